package main

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// authorizedCallers states who may call each endpoint. It is written by hand, independently of package auth. No flag
// rewrites it.
//
//go:embed testdata/authorized_callers.txt
var authorizedCallers string

const callersFile = "testdata/authorized_callers.txt"

// about is the kind of thing that an endpoint's calls act on. It determines in which tenant the caller must have a
// role.
type about string

const (
	aboutCloud   about = "cloud"
	aboutOrg     about = "org"
	aboutProject about = "project"
	aboutNamed   about = "named"
	aboutNothing about = "-"
)

// Callers in authorizedCallers that are not holders of a role:
const (
	callerAuthenticated = "authenticated"
	callerAnyone        = "anyone"
	callerNobody        = "nobody"
	callerEtcdUser      = "etcd-user"
	callerAnonymous     = "anonymous"
	callerHost          = "host"
	callerMember        = "member"
	callerJoinToken     = "join-token"
)

// access is the content of one line of authorizedCallers: what the endpoint is about and who may call it.
type access struct {
	about   about
	callers []string
}

// allows reports whether the line contains this kind of caller.
func (a access) allows(caller string) bool { return slices.Contains(a.callers, caller) }

// allowsRole reports whether an authenticated principal with the given role may call the endpoint.
func (a access) allowsRole(role cloud.Role) bool {
	return a.allows(callerAuthenticated) || a.allows(string(role))
}

// byRole reports whether the endpoint is authorized by roles, or open to all authenticated principals.
func (a access) byRole() bool {
	return a.about != aboutNothing
}

// parseAccess parses authorizedCallers and returns its lines by endpoint. An endpoint has the name of its row
// (endpoint.row).
func parseAccess(text string) (map[string]access, error) {
	all := map[string]access{}
	callers := []string{
		callerAuthenticated, callerAnyone, callerNobody, callerEtcdUser, callerAnonymous, callerHost, callerMember, callerJoinToken,
	}
	for _, role := range cloud.Roles() {
		callers = append(callers, string(role))
	}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] == "#" {
			continue
		}
		i := slices.IndexFunc(words, func(w string) bool {
			return slices.Contains([]about{aboutCloud, aboutOrg, aboutProject, aboutNamed, aboutNothing}, about(w))
		})
		if i < 1 || i == len(words)-1 {
			return nil, fmt.Errorf("%q is not an endpoint, what it is about, and callers", line)
		}
		name, a := strings.Join(words[:i], " "), access{about(words[i]), words[i+1:]}
		for _, c := range a.callers {
			if !slices.Contains(callers, c) {
				return nil, fmt.Errorf("%s: %q is no caller", name, c)
			}
		}
		if _, twice := all[name]; twice {
			return nil, fmt.Errorf("%s has two lines", name)
		}
		all[name] = a
	}
	return all, nil
}

func TestParseAccess(t *testing.T) {
	all, err := parseAccess("# a comment\n\nvm GET /x  project  org:admin project:viewer\n/a.B/C - anyone\n")
	require.NoError(t, err)
	require.Equal(t, map[string]access{
		"vm GET /x": {aboutProject, []string{"org:admin", "project:viewer"}},
		"/a.B/C":    {aboutNothing, []string{"anyone"}},
	}, all)
	for _, bad := range []string{"/a.B/C anyone", "/a.B/C -", "- anyone", "/a.B/C - stranger", "/a.B/C - host\n/a.B/C - host"} {
		_, err := parseAccess(bad)
		require.Error(t, err, bad)
	}
}

// TestEveryRoleOfTheMatrixCounts adds each role to, or removes it from, each line of authorizedCallers. Each such
// change must change the expected outcome in at least one column. Otherwise the matrix would not notice a rule of
// package auth with a role too many or too few.
func TestEveryRoleOfTheMatrixCounts(t *testing.T) {
	all, err := parseAccess(authorizedCallers)
	require.NoError(t, err)
	require.Greater(t, len(all), 150)
	differs := func(e endpoint, changed access) bool {
		other := e
		other.access = changed
		r := row{name: e.name, path: e.path, body: webRequest(``), allowed: "OK"}
		return slices.ContainsFunc(columns, func(c column) bool { return expected(e, r, c) != expected(other, r, c) })
	}
	for name, a := range all {
		e := endpoint{name: name, row: name, access: a}
		if _, rest, ok := strings.Cut(name, " "); ok {
			e.method, e.path, _ = strings.Cut(rest, " ")
		}
		if a.byRole() && !a.allows(callerAuthenticated) {
			for _, role := range cloud.Roles() {
				if a.about == aboutCloud && role != cloud.SystemAdmin && role != cloud.BillingAdmin {
					continue // a role in an org or a project gives no rights in the cloud
				}
				changed := access{a.about, slices.DeleteFunc(slices.Clone(a.callers), func(c string) bool { return c == string(role) })}
				if len(changed.callers) == len(a.callers) {
					changed.callers = append(changed.callers, string(role))
				}
				require.True(t, differs(e, changed), "%s and %s", name, role)
			}
		}
		switch {
		case a.allows(callerHost), a.allows(callerMember):
		case a.allows(callerNobody):
			require.True(t, differs(e, access{aboutNothing, []string{callerAnyone}}), name)
		case a.allows(callerAnyone):
			require.True(t, differs(e, access{aboutCloud, []string{callerAuthenticated}}), name)
		default:
			require.True(t, differs(e, access{aboutNothing, []string{callerAnyone}}), name)
			require.True(t, !a.byRole() || a.about == aboutCloud || differs(e, access{aboutCloud, a.callers}), name)
		}
	}
}
