// Package identity holds the commands for the identity service: orgs, projects, quotas, users, role bindings,
// invitations, tokens, service accounts, signing keys and the audit log. It also reads names and passwords, and package
// login uses it for that.
//
// Decisions:
//   - No flag or argument of these commands contains a password, a secret or a token. They are typed at the terminal,
//     or read from a file, standard input or the environment, because other users of a host can list the arguments of
//     its processes.
//   - `trivet quota update` reads the quota, changes the limits whose flags are given and writes the quota back, because
//     SetQuota replaces all limits. If two of these commands run at the same time, one may undo the other's change.
//   - `trivet service-account create --secret-file` creates the file before the account. The control plane returns a
//     secret only once, and it would be lost if the file could not be created.
//   - The package contains the names of the roles and where each can be given. The control plane decides what a role
//     allows.
package identity

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
)

// callTimeout is the deadline of a command unless --timeout is given.
const callTimeout = 30 * time.Second

// Commands returns the commands of this package, which become subcommands of `trivet`.
func Commands(s *session.Session) []*cobra.Command {
	users := userNames(s)
	return []*cobra.Command{
		whoAmICommand(s), orgCommand(s), projectCommand(s), quotaCommand(s), userCommand(s), groupCommand(s, users), bindingCommand(s, users), invitationCommand(s),
		tokenCommand(s, users), serviceAccountCommand(s), keyCommand(s), auditCommand(s, users),
	}
}
