package login

import (
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/cli/account"
)

// contextFor returns the name of the context under which the login l is saved. If the parameter named is not empty, it
// is that name. Otherwise it is the name of a context with an equal login, preferably the current one. If there is
// none, it is a new name.
func contextFor(b *account.Book, l *account.Login, named string) string {
	if named != "" {
		return named
	}
	for _, name := range append([]string{b.Current}, b.Names()...) {
		if have := b.Contexts[name]; have != nil && sameLogin(have, l) {
			return name
		}
	}
	name := defaultContextName(l)
	for n := 2; b.Contexts[name] != nil; n++ {
		name = defaultContextName(l) + "-" + strconv.Itoa(n)
	}
	return name
}

// sameLogin reports whether two logins have the same endpoints, user, provider, org and project. If both have the same
// project and one of them has no org, the orgs count as the same.
func sameLogin(a, b *account.Login) bool {
	sameOrg := a.Org == b.Org || a.Project != "" && (a.Org == "" || b.Org == "")
	return sameEndpoints(a, b) && a.User == b.User && a.Provider == b.Provider && sameOrg && a.Project == b.Project
}

func sameEndpoints(a, b *account.Login) bool {
	return slices.Equal(slices.Sorted(slices.Values(a.Endpoints)), slices.Sorted(slices.Values(b.Endpoints)))
}

// defaultContextName returns the name of a new context: USER/PROJECT@HOST, or USER/ORG@HOST if there is no project, or
// USER@HOST if there is no org either or the user is a service account, whose name contains the project. HOST is the first endpoint, without the port if that is the default.
func defaultContextName(l *account.Login) string {
	name := l.User
	switch {
	case strings.Contains(name, "/"): // a service account, NAME@ORG/PROJECT
	case l.Project != "":
		name += "/" + l.Project
	case l.Org != "":
		name += "/" + l.Org
	}
	name += "@" + strings.TrimSuffix(l.Endpoints[0], ":"+account.DefaultPort)
	if account.CheckContext(name) != nil { // the user ID comes from the server and may be invalid in a context name
		return account.Before
	}
	return name
}
