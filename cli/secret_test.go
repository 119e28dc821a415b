package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/session"
)

// TestNoFlagTakesASecret checks that no flag has a secret as its value, except one whose help warns about that. Other
// flags name files, because other users of the host can read a program's arguments.
func TestNoFlagTakesASecret(t *testing.T) {
	_, root := commands(session.Shell{Env: func(string) string { return "" }})
	secret := regexp.MustCompile(`token|password|secret|credential`)
	named := 0
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		check := func(f *pflag.Flag) {
			if secret.MatchString(f.Name) && f.Name != "page-token" { // which is not a secret
				named++
				require.True(t, strings.HasSuffix(f.Name, "-file") || f.Value.Type() == "bool", "%s --%s", c.CommandPath(), f.Name)
			}
		}
		c.Flags().VisitAll(check)
		if c != root {
			c.PersistentFlags().VisitAll(check)
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	require.GreaterOrEqual(t, named, 4)
	require.Contains(t, root.PersistentFlags().Lookup("token").Usage, "visible to other users")
}
