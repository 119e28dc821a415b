package explain

import (
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
)

// hints maps reasons of the control plane's errors to what the user can do. Reasons without an entry have messages that
// say it already.
var hints = map[string]string{
	"UNAUTHENTICATED_TOKEN": "run `trivet login`",
	"TOKEN_SCOPE":           "`trivet login --org= --project=` gets one token that is valid in all projects in which you have a role; then name the project with --org and --project",
	"TENANT_REQUIRED":       "name it with --project, or --org, or with TRIVET_PROJECT and TRIVET_ORG; `trivet project list` shows your projects",
	"NO_ROLE_IN_SCOPE":      "log in without --org and --project; then `trivet whoami` shows your roles, and `trivet invitation list` the roles that you are offered",
	"TENANT_NOT_FOUND":      "`trivet project list` shows the projects that you have a role in",
	"IN_USE":                "delete or detach what uses it first",
	"QUOTA_EXCEEDED":        "`trivet quota show` shows the limits and what is used",
}

// denied returns the hint after a PERMISSION_DENIED error with a reason.
func denied(reason string) string {
	if hint := hints[reason]; hint != "" {
		return hint
	}
	return "`trivet whoami` shows your roles; an administrator gives others"
}

// notLinked is the reason in the control plane's error for an identity at an OpenID provider that is linked to no user.
const notLinked = "NOT_LINKED"

func unauthenticated(f Facts, info *errdetails.ErrorInfo) string {
	switch {
	case info.GetReason() == notLinked:
		return fmt.Sprintf("ask an administrator to run `trivet user link USER --provider %s --subject %s`",
			Quoted(info.GetMetadata()["provider"]), Quoted(info.GetMetadata()["subject"]))
	case f.LoggingIn:
		return ""
	case f.Source == "":
		return "run " + login(f) + ", or give a token with --token-file or TRIVET_TOKEN"
	case f.Source == SavedLogin:
		return "the login has expired: run " + login(f)
	}
	return "the token given by " + f.Source + " is not accepted: give another, or run `trivet login`"
}

func login(f Facts) string {
	if f.Context != "" {
		return "`trivet login --context " + f.Context + "`"
	}
	return "`trivet login`"
}

// Quoted returns word with shell quotes if it needs them, so that a command in a hint can be copied safely.
func Quoted(word string) string {
	if word != "" && !strings.ContainsFunc(word, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && !strings.ContainsRune("._@/-", r)
	}) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
