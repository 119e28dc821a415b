package identity

import (
	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// displayNameOrID is the help of --name for objects whose display name is the ID if none is set.
const displayNameOrID = "new display name; empty for the ID"

// displayNameFlag adds the required flag --name to a command that changes a display name.
func displayNameFlag(c *cobra.Command, name *string, usage string) {
	c.Flags().StringVar(name, "name", "", usage)
	session.Require(c, "name")
}

// created formats the time at which an object was created, and its age.
func created(s *session.Session, ms int64) string {
	if ms == 0 {
		return ""
	}
	return show.When(ms) + " (" + show.Age(s.Now(), ms) + " ago)"
}
