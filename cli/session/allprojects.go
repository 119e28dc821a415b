package session

import (
	"strings"

	"github.com/spf13/cobra"
)

// AllProjectsFlag adds the flag --all-projects, which sets *all, to a command that lists objects of projects.
func AllProjectsFlag(c *cobra.Command, all *bool) {
	c.Flags().BoolVar(all, "all-projects", false, "list those of all projects, or with --org of one org: for operators of the cloud")
}

// Within returns the org and project to which --org and --project limit a list over all projects. Unlike Named, it
// ignores the environment, which names the project of other commands.
func (s *Session) Within() (org, project string) {
	if s.Given("org") {
		org = s.flags.org
	}
	if s.Given("project") {
		project = s.flags.project
		if of, name, ok := strings.Cut(project, "/"); ok {
			org, project = of, name
		}
	}
	return org, project
}
