package session

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// Require marks flags as required, also in the help. Cobra's own error has another form than the program's.
func Require(c *cobra.Command, flags ...string) {
	for _, f := range flags {
		_ = c.MarkFlagRequired(f) // its only error is for an unknown flag
		c.Flags().Lookup(f).Usage += " (required)"
	}
	check(c, func() error {
		missing := slices.DeleteFunc(slices.Clone(flags), c.Flags().Changed)
		switch len(missing) {
		case 0:
			return nil
		case 1:
			return Usagef("--%s is required", missing[0])
		}
		return Usagef("%s are required", enumerate(missing, "and"))
	})
}

// RequireOne marks flags of which at least one is required.
func RequireOne(c *cobra.Command, flags ...string) {
	c.MarkFlagsOneRequired(flags...)
	check(c, func() error {
		if slices.ContainsFunc(flags, c.Flags().Changed) {
			return nil
		}
		return Usagef("one of %s is required", enumerate(flags, "and"))
	})
}

// Exclusive marks flags of which at most one may be given.
func Exclusive(c *cobra.Command, flags ...string) {
	c.MarkFlagsMutuallyExclusive(flags...)
	check(c, func() error {
		given := slices.DeleteFunc(slices.Clone(flags), func(f string) bool { return !c.Flags().Changed(f) })
		if len(given) < 2 {
			return nil
		}
		return Usagef("%s cannot be combined", enumerate(given, "and"))
	})
}

// check adds a check of the flags that is executed before those of cobra and before the command.
func check(c *cobra.Command, f func() error) {
	before := c.PreRunE
	c.PreRunE = func(cmd *cobra.Command, args []string) error {
		if before != nil {
			if err := before(cmd, args); err != nil {
				return err
			}
		}
		return f()
	}
}

// enumerate returns flags as a list for a sentence, such as "--port, --vm and --ip".
func enumerate(flags []string, conjunction string) string {
	names := make([]string, len(flags))
	for i, f := range flags {
		names[i] = "--" + f
	}
	if len(names) == 1 {
		return names[0]
	}
	return strings.Join(names[:len(names)-1], ", ") + " " + conjunction + " " + names[len(names)-1]
}

// Alternatives returns flags as a list for a sentence, such as "--port, --vm or --ip".
func Alternatives(flags ...string) string { return enumerate(flags, "or") }
