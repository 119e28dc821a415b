package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
)

// groups lists the headings under which `trivet --help` shows the commands, with the commands of each.
var groups = []struct {
	title    string
	commands []string
}{
	{"VMs and storage", []string{"vm", "instance-type", "image", "volume", "snapshot", "storage-class", "apply"}},
	{"Networks", []string{"network"}},
	{"Data and credit", []string{"kv", "wallet", "quota"}},
	{"Login", []string{"login", "logout", "context", "whoami", "token", "invitation"}},
	{"Orgs, projects and users", []string{"org", "project", "user", "group", "binding", "service-account", "audit"}},
	{"Operation of the cloud", []string{"host", "cluster", "key"}},
	{"This program", []string{"version", "completion", "help"}},
}

// globalFlags is the part of cobra's usage template that lists the global flags, which each command has.
const globalFlags = `Global Flags:
{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}`

// arrangeHelp groups the commands in the help of root. The help of each other command refers to the global flags of root
// instead of repeating them.
func arrangeHelp(root *cobra.Command) {
	template := root.UsageTemplate()
	root.SetUsageTemplate(strings.Replace(template, globalFlags, "Global flags: see \"{{.Root.Name}} --help\".", 1))
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" { // cobra's function does not fail for an unknown command
			c.Run, c.RunE = nil, func(_ *cobra.Command, args []string) error { return session.Help(root, args) }
		}
	}
	root.InitDefaultCompletionCmd()
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.title, Title: g.title + ":"})
		for _, c := range root.Commands() {
			for _, name := range g.commands {
				if c.Name() == name {
					c.GroupID = g.title
				}
			}
		}
	}
	root.SetHelpCommandGroupID(groups[len(groups)-1].title)
	root.SetCompletionCommandGroupID(groups[len(groups)-1].title)
}
