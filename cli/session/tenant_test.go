package session

import (
	"testing"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// TestOnlyTenant checks for which roles a command that names no org and no project means one of them.
func TestOnlyTenant(t *testing.T) {
	in := func(org, project string) *identityv1.Binding {
		return &identityv1.Binding{OrgId: org, ProjectId: project}
	}
	for name, c := range map[string]struct {
		roles        []*identityv1.Binding
		org, project string
	}{
		"no role":                             {nil, "", ""},
		"a role in the whole cloud":           {[]*identityv1.Binding{in("acme", ""), in("", "")}, "", ""},
		"one org":                             {[]*identityv1.Binding{in("acme", ""), in("acme", "")}, "acme", ""},
		"one project":                         {[]*identityv1.Binding{in("acme", "web"), in("acme", "web")}, "acme", "web"},
		"an org and one of its projects":      {[]*identityv1.Binding{in("acme", "web"), in("acme", ""), in("acme", "shop")}, "acme", ""},
		"two orgs":                            {[]*identityv1.Binding{in("acme", ""), in("other", "")}, "", ""},
		"an org and a project of another one": {[]*identityv1.Binding{in("acme", ""), in("other", "web")}, "", ""},
		"two projects":                        {[]*identityv1.Binding{in("acme", "web"), in("acme", "shop")}, "", ""},
	} {
		org, project := onlyTenant(c.roles)
		require.Equal(t, []string{c.org, c.project}, []string{org, project}, name)
	}
}
