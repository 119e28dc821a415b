package main

import (
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/session"
)

// everyCommand calls f with each command of the program, except cobra's own.
func everyCommand(f func(*cobra.Command)) {
	_, root := commands(session.Shell{
		Env: func(string) string { return "" }, Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Now: time.Now,
	})
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		f(c)
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
}

// TestFlagConventions checks the flags of all commands: durations with days and above 0, limits, and help texts that
// pflag prints as they are. pflag takes a word between backticks for the name of the value.
func TestFlagConventions(t *testing.T) {
	seen := map[*pflag.Flag]bool{}
	everyCommand(func(c *cobra.Command) {
		check := func(f *pflag.Flag) {
			name := c.CommandPath() + " --" + f.Name
			if seen[f] {
				return
			}
			seen[f] = true
			require.NotContains(t, f.Usage, "`", name)
			for _, begin := range []string{"and ", "with that", "with this"} {
				require.False(t, strings.HasPrefix(f.Usage, begin), "%s: the help continues that of another flag: %q", name, f.Usage)
			}
			switch {
			case f.Value.Type() == "duration":
				require.Error(t, f.Value.Set("0s"), name)
				require.Error(t, f.Value.Set("-1h"), name)
				require.NoError(t, f.Value.Set("1d"), name)
			case f.Name == "limit":
				require.Error(t, f.Value.Set("-1"), name)
			}
		}
		c.PersistentFlags().VisitAll(check)
		c.Flags().VisitAll(check)
	})
}

// TestListFlags checks that all lists have the flags of package list. Those of the key-value store are as in etcdctl.
func TestListFlags(t *testing.T) {
	lists := 0
	everyCommand(func(c *cobra.Command) {
		if c.Name() != "list" || strings.HasPrefix(c.CommandPath(), "trivet kv ") {
			return
		}
		lists++
		for _, flag := range []string{"columns", "sort", "no-headers", "limit", "page-token"} {
			require.NotNil(t, c.Flags().Lookup(flag), "%s --%s", c.CommandPath(), flag)
		}
		// The objects of these lists are not messages of the API.
		local := slices.Contains([]string{"trivet context list", "trivet image catalog list"}, c.CommandPath())
		require.Equal(t, !local, c.Flags().Lookup("filter") != nil, c.CommandPath())
	})
	require.GreaterOrEqual(t, lists, 25)
}

// TestAllProjectsFlag checks that operators can list the objects of all projects for each kind of object of projects that
// belong to VMs, volumes, images and networks.
func TestAllProjectsFlag(t *testing.T) {
	everyCommand(func(c *cobra.Command) {
		name := strings.TrimPrefix(c.CommandPath(), "trivet ")
		ofProject := slices.Contains([]string{"vm list", "volume list", "snapshot list", "image list"}, name) ||
			strings.HasPrefix(name, "network ") && name != "network external list" && name != "network rule list"
		if c.Name() == "list" && ofProject {
			require.NotNil(t, c.Flags().Lookup("all-projects"), c.CommandPath())
		}
	})
}

// TestWaitFlags checks that --wait and --no-wait have the same help everywhere, and that the commands which change VMs
// asynchronously, and no command with only one of the flags, exist.
func TestWaitFlags(t *testing.T) {
	const isDefault = " (default)"
	var waiting []string
	everyCommand(func(c *cobra.Command) {
		wait, noWait := c.Flags().Lookup("wait"), c.Flags().Lookup("no-wait")
		require.Equal(t, wait == nil, noWait == nil, c.CommandPath())
		if wait == nil {
			return
		}
		waiting = append(waiting, strings.TrimPrefix(c.CommandPath(), "trivet "))
		require.Equal(t, "wait until the operation is complete, or until --timeout has passed", strings.TrimSuffix(wait.Usage, isDefault))
		require.Equal(t, "return when the operation is recorded, before it is complete", strings.TrimSuffix(noWait.Usage, isDefault))
		require.NotEqual(t, strings.HasSuffix(wait.Usage, isDefault), strings.HasSuffix(noWait.Usage, isDefault), "%s: one of both is the default", c.CommandPath())
	})
	for _, c := range []string{"create", "start", "stop", "reboot", "reset", "delete", "rescue", "migrate", "recover", "disk attach", "disk detach", "nic attach", "nic detach"} {
		require.Contains(t, waiting, "vm "+c)
	}
}

// TestVerbConventions checks that the usual verbs have their aliases everywhere, and that show and delete with one
// argument take several.
func TestVerbConventions(t *testing.T) {
	everyCommand(func(c *cobra.Command) {
		args := strings.Fields(c.Use)[1:]
		switch c.Name() {
		case "list":
			require.Contains(t, c.Aliases, "ls", c.CommandPath())
		case "show":
			require.Contains(t, c.Aliases, "describe", c.CommandPath())
		case "delete":
			require.Contains(t, c.Aliases, "rm", c.CommandPath())
		case "add", "remove", "set", "get":
			// The commands for members of clusters and groups and for routes, and etcd's commands, have the names that their users know.
			require.Regexp(t, `^trivet (cluster|group|network route|kv) `, c.CommandPath())
		}
		if (c.Name() == "show" || c.Name() == "delete") && len(args) == 1 && !strings.HasPrefix(args[0], "[") {
			require.True(t, strings.HasSuffix(args[0], "..."), "%s takes one argument only", c.CommandPath())
		}
	})
}

// TestUnknownCommands checks that each command with subcommands suggests one for a name with a typing error.
func TestUnknownCommands(t *testing.T) {
	everyCommand(func(c *cobra.Command) {
		if !c.HasAvailableSubCommands() || c.Name() == "completion" {
			return
		}
		for _, sub := range c.Commands() {
			if len(sub.Name()) < 4 || !sub.IsAvailableCommand() {
				continue
			}
			err := c.ValidateArgs([]string{sub.Name() + "x"})
			var p *session.Problem
			require.ErrorAs(t, err, &p, c.CommandPath())
			require.Contains(t, p.Hint, "did you mean `"+c.CommandPath(), c.CommandPath())
		}
	})
}
