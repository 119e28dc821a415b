package session

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
)

// aliases lists other names for the usual verbs. A command gets those that no other command of its group has.
var aliases = map[string][]string{
	"list":   {"ls"},
	"show":   {"get", "describe"},
	"delete": {"rm"},
	"log":    {"logs"},
}

// oldNames is the annotation with the former names of a command, separated by spaces.
const oldNames = "trivet.old"

// Old makes c also known by former names, which the help does not show.
func Old(c *cobra.Command, names ...string) {
	if c.Annotations == nil {
		c.Annotations = map[string]string{}
	}
	c.Annotations[oldNames] = strings.Join(names, " ")
	c.Aliases = append(c.Aliases, names...)
}

// Finish completes root and all its subcommands with what is common to all commands: aliases, suggestions for unknown
// commands and flags, errors for values of flags, and values of flags for durations and limits. All commands must have
// been added before.
func (s *Session) Finish(root *cobra.Command) {
	root.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	root.SetFlagErrorFunc(flagError)
	usage := root.UsageFunc()
	root.SetUsageFunc(func(c *cobra.Command) error {
		all := c.Aliases
		old := strings.Fields(c.Annotations[oldNames])
		c.Aliases = slices.DeleteFunc(slices.Clone(all), func(a string) bool { return slices.Contains(old, a) })
		defer func() { c.Aliases = all }()
		return usage(c)
	})
	finish(root)
}

func finish(c *cobra.Command) {
	if c.HasSubCommands() {
		c.Args = unknownCommand
		if show := c.RunE; c.HasParent() && show != nil { // as in `trivet vm help list`
			c.RunE = func(c *cobra.Command, args []string) error {
				if len(args) > 0 && args[0] == "help" {
					return Help(c, args[1:])
				}
				return show(c, args)
			}
		}
	}
	for _, flags := range []*pflag.FlagSet{c.PersistentFlags(), c.Flags()} {
		flags.VisitAll(func(f *pflag.Flag) {
			switch {
			case f.Value.Type() == "duration":
				f.Value = duration{f.Value}
				if f.DefValue == "0s" {
					f.DefValue = "0" // the help does not show this default
				}
			case f.Name == "limit" && strings.HasPrefix(f.Value.Type(), "int"):
				f.Value = limit{f.Value}
			}
		})
	}
	taken := map[string]bool{}
	for _, sub := range c.Commands() {
		taken[sub.Name()] = true
		for _, a := range sub.Aliases {
			taken[a] = true
		}
	}
	for _, sub := range c.Commands() {
		for _, a := range aliases[sub.Name()] {
			if !taken[a] {
				sub.Aliases = append(sub.Aliases, a)
			}
		}
		finish(sub)
	}
}

// Help prints the help of the subcommand of c that names select. It returns a *Problem if there is none.
func Help(c *cobra.Command, names []string) error {
	for len(names) > 0 && c.HasSubCommands() {
		i := slices.IndexFunc(c.Commands(), func(sub *cobra.Command) bool { return sub.Name() == names[0] || sub.HasAlias(names[0]) })
		if i < 0 {
			return unknownCommand(c, names)
		}
		c, names = c.Commands()[i], names[1:]
	}
	c.InitDefaultHelpFlag()
	return c.Help()
}

// unknownCommand is the check of the arguments of a command that only has subcommands.
func unknownCommand(c *cobra.Command, args []string) error {
	if len(args) == 0 || args[0] == "help" && c.HasParent() {
		return nil
	}
	// A candidate is a name or an alias; the suggestion is always the name.
	names := map[string]string{}
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names[sub.Name()] = sub.Name()
			for _, a := range sub.Aliases {
				names[a] = sub.Name()
			}
		}
	}
	p := &Problem{Code: codes.InvalidArgument, Message: fmt.Sprintf("unknown command %q for %q", args[0], c.CommandPath()),
		Hint: "run `" + c.CommandPath() + " --help`"}
	if sub := suggestedFor(c, args[0]); sub != nil {
		p.Hint = "did you mean `" + sub.CommandPath() + "`?"
	} else if path := swapped(c, args); path != "" {
		p.Hint = "did you mean `" + path + "`?"
	} else if name := closest(args[0], names); name != "" {
		p.Hint = "did you mean `" + c.CommandPath() + " " + name + "`?"
	}
	return p
}

// suggestedFor returns the subcommand of c that lists word in its field SuggestFor, which holds names that users of other
// programs know, or nil. Such a name has too little in common with the name of the command for closest.
func suggestedFor(c *cobra.Command, word string) *cobra.Command {
	for _, sub := range c.Commands() {
		if slices.Contains(sub.SuggestFor, word) {
			return sub
		}
	}
	return nil
}

// swapped returns the path of the command if args begin with a verb and the name of a command that has it, as in kubectl:
// `get vms` is `trivet vm list`. It returns "" otherwise.
func swapped(c *cobra.Command, args []string) string {
	if len(args) < 2 {
		return ""
	}
	verb, noun := args[0], strings.TrimSuffix(args[1], "s")
	if verb == "get" && len(args) == 2 {
		verb = "list"
	}
	for _, sub := range c.Commands() {
		if sub.Name() != noun && !sub.HasAlias(noun) && sub.Name() != args[1] && !sub.HasAlias(args[1]) {
			continue
		}
		for _, one := range sub.Commands() {
			if one.Name() == verb || one.HasAlias(verb) {
				return one.CommandPath()
			}
		}
	}
	return ""
}

// closest returns the value of the key with the smallest edit distance to word, or "" if none is similar. Of several
// keys with the same distance, it uses the first in alphabetical order.
func closest(word string, names map[string]string) string {
	best, found := 3, ""
	if len(word) < 4 {
		best = 2
	}
	keys := make([]string, 0, len(names))
	for k := range names {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		d := levenshtein.ComputeDistance(word, k)
		if strings.HasPrefix(k, word) && len(word) > 2 || sorted(k) == sorted(word) {
			d = min(d, 1)
		}
		if d < best {
			best, found = d, names[k]
		}
	}
	return found
}

// sorted returns the letters of a word in alphabetical order. Words with the same letters are similar.
func sorted(word string) string {
	letters := []byte(word)
	slices.Sort(letters)
	return string(letters)
}

// flagError returns the error for a flag that cannot be parsed.
func flagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	var missing *pflag.ValueRequiredError
	p := &Problem{Code: codes.InvalidArgument, Message: err.Error(), Hint: "run `" + c.CommandPath() + " --help`", Err: err}
	switch {
	case errors.As(err, &unknown) && c.HasSubCommands() && c.Flags().NArg() > 0 && c.Flags().Arg(0) != "help":
		return unknownCommand(c, c.Flags().Args())
	case errors.As(err, &unknown):
		names := map[string]string{}
		each := func(f *pflag.Flag) {
			if !f.Hidden {
				names[f.Name] = f.Name
			}
		}
		c.Flags().VisitAll(each)
		c.InheritedFlags().VisitAll(each)
		dashes := "--"
		if unknown.GetSpecifiedShortnames() != "" {
			dashes = "-"
		} else if name := closest(unknown.GetSpecifiedName(), names); name != "" {
			p.Hint = "did you mean --" + name + "?"
		}
		p.Message = "unknown flag " + dashes + unknown.GetSpecifiedName()
	case errors.As(err, &missing):
		p.Message = "--" + missing.GetFlag().Name + " needs a value"
	case errors.As(err, &invalid):
		p.Message = fmt.Sprintf("--%s %q: %s", invalid.GetFlag().Name, invalid.GetValue(), wanted(invalid))
	}
	return p
}

// wanted says which values a flag accepts.
func wanted(e *pflag.InvalidValueError) string {
	switch kind := e.GetFlag().Value.Type(); {
	case kind == "bool":
		return "want true or false"
	case strings.HasPrefix(kind, "uint"):
		return "want a whole number, 0 or more"
	case strings.HasPrefix(kind, "int") && e.GetFlag().Name != "limit":
		return "want a whole number"
	}
	return e.Unwrap().Error()
}

// limit is the value of a flag --limit.
type limit struct{ pflag.Value }

func (l limit) Set(text string) error {
	if n, err := strconv.Atoi(text); err != nil || n < 0 {
		return errors.New("want a whole number, 0 or more; 0 means no limit")
	}
	return l.Value.Set(text)
}
