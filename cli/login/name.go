package login

import (
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/cli/account"
)

// contextFor returns the name of the context to save l as: named if it is not empty; else the context with an equal
// login, preferring the current one; else a new name.
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

// sameLogin reports whether two logins are equal except for their tokens. A login that names a project without its org
// equals one that also names the org.
func sameLogin(a, b *account.Login) bool {
	sameOrg := a.Org == b.Org || a.Project != "" && (a.Org == "" || b.Org == "")
	return sameEndpoints(a, b) && a.User == b.User && a.Provider == b.Provider && sameOrg && a.Project == b.Project
}

func sameEndpoints(a, b *account.Login) bool {
	return slices.Equal(slices.Sorted(slices.Values(a.Endpoints)), slices.Sorted(slices.Values(b.Endpoints)))
}

// defaultContextName returns USER/PROJECT@HOST, with the org if there is no project, and the first of several
// endpoints.
func defaultContextName(l *account.Login) string {
	name := l.User
	switch {
	case l.Project != "":
		name += "/" + l.Project
	case l.Org != "":
		name += "/" + l.Org
	}
	name += "@" + strings.TrimSuffix(l.Endpoints[0], ":"+account.DefaultPort)
	if account.CheckContext(name) != nil { // the user ID comes from the server and may break the rules of context names
		return account.Before
	}
	return name
}
