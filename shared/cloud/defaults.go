package cloud

import "slices"

// Defaults are the tenants that are used for a user's calls and tokens that name no tenant. The first role in an org
// makes that org the default org. The first role in a project makes that project the default project of its org and of
// the user. A default stays as long as the user has a role there. Therefore an additional role never changes the tenant
// of a token in use.
type Defaults struct {
	Org     OrgID  `cbor:",omitempty"`
	Project Tenant `cbor:",omitzero"`
	// Projects are the default projects within each org, for tokens and calls that name only an org.
	Projects []Tenant `cbor:",omitempty"`
}

// WithBindings returns the user's new defaults after a change of the user's bindings. A default in which the user still
// has a role stays. If there is no such default and the user has a role in only one org or project, that becomes the
// default.
func (d Defaults) WithBindings(all []Binding) (out Defaults) {
	orgs, projects := OrgsOf(all), ProjectsOf(all, "")
	out.Org, _ = Prefer(orgs, d.Org)
	out.Project, _ = Prefer(projects, d.Project)
	for _, org := range orgs {
		if p, ok := Prefer(ProjectsOf(all, org), Tenant{org, d.ProjectIn(org)}); ok {
			out.Projects = append(out.Projects, p)
		}
	}
	return out
}

// ProjectIn returns the default project of an org, or the user's default project if org is empty.
func (d Defaults) ProjectIn(org OrgID) ProjectID {
	if org == "" {
		return d.Project.Project
	}
	for _, p := range d.Projects {
		if p.Org == org {
			return p.Project
		}
	}
	return ""
}

// Prefer returns preferred if the list contains it. Otherwise, if the list has only one element, it returns that
// element. Otherwise it returns false.
func Prefer[T comparable](all []T, preferred T) (T, bool) {
	switch {
	case slices.Contains(all, preferred):
		return preferred, true
	case len(all) == 1:
		return all[0], true
	}
	return *new(T), false
}

// OrgsOf returns the orgs of the bindings, each once, in the order of the bindings.
func OrgsOf(all []Binding) (found []OrgID) {
	for _, b := range all {
		if b.Org != "" && !slices.Contains(found, b.Org) {
			found = append(found, b.Org)
		}
	}
	return found
}

// ProjectsOf returns the projects of the bindings, each once, in the order of the bindings. If org is not empty, it
// returns only the projects of that org.
func ProjectsOf(all []Binding, org OrgID) (found []Tenant) {
	for _, b := range all {
		t := Tenant{b.Org, b.Project}
		if t.Project != "" && (org == "" || org == t.Org) && !slices.Contains(found, t) {
			found = append(found, t)
		}
	}
	return found
}
