package cloud

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDefaultsDoNotChange checks that an additional role changes no default. Only if the last role in a default org or
// project is removed may another default, or none, replace it.
func TestDefaultsDoNotChange(t *testing.T) {
	web, shop, secret := Binding{Role: ProjectMember, Org: "acme", Project: "web"}, Binding{Role: ProjectViewer, Org: "acme", Project: "shop"}, Binding{Role: ProjectAdmin, Org: "evil", Project: "lair"}
	acme, evil := Binding{Role: OrgAdmin, Org: "acme", Project: ""}, Binding{Role: OrgAdmin, Org: "evil", Project: ""}
	var roles []Binding
	var d Defaults
	for _, b := range []Binding{acme, web, secret, shop, evil} {
		roles = append(roles, b)
		d = d.WithBindings(roles)
		require.Equal(t, OrgID("acme"), d.Org)
	}
	require.Equal(t, Tenant{"acme", "web"}, d.Project)
	require.Equal(t, []ProjectID{"web", "lair", ""}, []ProjectID{d.ProjectIn("acme"), d.ProjectIn("evil"), d.ProjectIn("other")})

	d = d.WithBindings([]Binding{acme, secret, shop})
	require.Zero(t, d.Project, "there must be no default project when the default was removed and several projects remain")
	require.Equal(t, ProjectID("shop"), d.ProjectIn("acme"))
	require.Equal(t, Tenant{"acme", "shop"}, d.WithBindings([]Binding{acme, shop}).Project)
	require.Zero(t, d.WithBindings(nil))
	require.Zero(t, Defaults{}.WithBindings([]Binding{web, shop}).Project, "an additional role must not make a default for roles that were stored without one")

	c := &Caller{Proof: ProofPassword, Bindings: []Binding{web, shop, secret}, Defaults: Defaults{}.WithBindings([]Binding{web})}
	require.Equal(t, []ProjectID{"web", "lair", ""}, []ProjectID{c.ProjectIn("acme"), c.ProjectIn("evil"), c.ProjectIn("other")})
	c.Chosen.Project = "shop"
	require.Equal(t, []ProjectID{"shop", "lair"}, []ProjectID{c.ProjectIn("acme"), c.ProjectIn("evil")})
}
