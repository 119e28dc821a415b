package network

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// refFlag adds a flag that refers to a resource by name or ID, with shell completion.
func refFlag(c *cobra.Command, s *session.Session, to *string, flag, usage string, of finder) {
	c.Flags().StringVar(to, flag, "", usage)
	completeFlag(c, flag, of.complete(s))
}

// refsFlag adds a repeatable flag whose values are names or IDs of resources, separated by commas.
func refsFlag(c *cobra.Command, s *session.Session, to *[]string, flag, usage string, of finder) {
	c.Flags().StringSliceVar(to, flag, nil, usage)
	completeFlag(c, flag, of.complete(s))
}

func completeFlag(c *cobra.Command, flag string, f cobra.CompletionFunc) {
	_ = c.RegisterFlagCompletionFunc(flag, f) // its only error is for an unknown flag
}

// prefixed returns a shell completion with the names of another one, each after a prefix such as "group:".
func prefixed(prefix string, of cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		name, ok := strings.CutPrefix(typed, prefix)
		if !ok && !strings.HasPrefix(prefix, typed) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		if !ok {
			name = ""
		}
		names, directive := of(cmd, args, name)
		for i := range names {
			names[i] = prefix + names[i]
		}
		return names, directive
	}
}

// optionalName accepts no argument, or the argument NAME.
func optionalName(_ *cobra.Command, args []string) error {
	return session.Exactly([]string{"NAME"}[:min(len(args), 1)]...)(nil, args)
}

// nameArg returns the first argument, or "" if there is none. It returns a *session.Usage error if that is not a valid
// name.
func nameArg(args []string) (string, error) {
	if len(args) == 0 {
		return "", nil
	}
	if err := cloud.CheckName("NAME", args[0]); err != nil {
		return "", session.Usagef("%v", err)
	}
	return args[0], nil
}

// checkCIDRs returns a *session.Usage error unless all values of a flag are prefixes or empty.
func checkCIDRs(flag string, values ...string) error {
	for _, v := range values {
		if v == "" {
			continue
		}
		if _, err := cloud.ParseCIDR(flag, v); err != nil {
			return session.Usagef("%v", err)
		}
	}
	return nil
}

// checkAddresses returns a *session.Usage error unless all values of a flag are IP addresses or empty.
func checkAddresses(flag string, values ...string) error {
	for _, v := range values {
		if v == "" {
			continue
		}
		if _, err := cloud.ParseAddr("--"+flag, v); err != nil {
			return session.Usagef("%v", err)
		}
	}
	return nil
}

// checkMAC returns a *session.Usage error unless the value of a flag is an Ethernet address or empty.
func checkMAC(flag, value string) error {
	if value == "" {
		return nil
	}
	if _, err := cloud.ParseMAC("--"+flag, value); err != nil {
		return session.Usagef("%v", err)
	}
	return nil
}

func isAddress(text string) bool {
	_, err := netip.ParseAddr(text)
	return err == nil
}

// firstError returns the first error that is not nil.
func firstError(errs ...error) error {
	if i := slices.IndexFunc(errs, func(err error) bool { return err != nil }); i >= 0 {
		return errs[i]
	}
	return nil
}

// changes holds the flags of `update` that all kinds have.
type changes struct {
	command           *cobra.Command
	name, description string
}

func (x *changes) add(c *cobra.Command) {
	x.command = c
	c.Flags().StringVar(&x.name, "name", "", "new name; empty for none")
	c.Flags().StringVar(&x.description, "description", "", "new description")
}

// check returns a *session.Usage error if none of the command's flags is given, or the new name is not valid.
func (x *changes) check() error {
	var all []string
	given := false
	x.command.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			all = append(all, f.Name)
			given = given || f.Changed
		}
	})
	if !given {
		return session.Usagef("nothing to change: give %s", session.Alternatives(all...))
	}
	if x.name == "" {
		return nil
	}
	if err := cloud.CheckName("--name", x.name); err != nil {
		return session.Usagef("%v", err)
	}
	return nil
}

// newName returns the new name, or nil if --name is not given.
func (x *changes) newName() *string { return x.given("name", x.name) }

// newDescription returns the new description, or nil if --description is not given.
func (x *changes) newDescription() *string { return x.given("description", x.description) }

func (x *changes) given(flag, value string) *string {
	if !x.command.Flags().Changed(flag) {
		return nil
	}
	return &value
}
