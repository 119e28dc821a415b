package rest

import (
	"context"
	"maps"
	"net/http"
	"strings"

	"github.com/google/uuid"
	"github.com/gorilla/mux"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Resolver returns the ID of the object with a name. t is the tenant that the query of the request names, with empty IDs
// if it names none. A Resolver returns NotFound if the caller in ctx may read objects of the kind and none has the name,
// and InvalidArgument if no object can have it.
type Resolver func(ctx context.Context, t cloud.Tenant, name string) (id string, err error)

// ResolveNames lets the paths of all routes contain names of objects in place of their IDs. collection is the segment of
// the path before the ID, such as vms in /api/v1/vms/{id}. A segment that is a UUID is never a name.
func (s *Server) ResolveNames(collection string, r Resolver) { s.resolvers[collection] = r }

// replaceNames replaces the names of objects in the variables of the path of r by their IDs. It returns NotFound if there
// is no object with a name. It does not replace a name that no object can have, or that the caller may not look up: the
// handler of the route then refuses the call.
func (s *Server) replaceNames(r *http.Request) (*http.Request, error) {
	vars := mux.Vars(r)
	route := mux.CurrentRoute(r)
	if len(vars) == 0 || route == nil {
		return r, nil
	}
	template, err := route.GetPathTemplate()
	if err != nil {
		return r, err
	}
	segments := strings.Split(template, "/")
	var ids map[string]string
	for i := 1; i < len(segments); i++ {
		variable, ok := strings.CutPrefix(segments[i], "{")
		resolve := s.resolvers[segments[i-1]]
		if !ok || resolve == nil {
			continue
		}
		variable = strings.TrimSuffix(variable, "}")
		name := vars[variable]
		if name == "" || uuid.Validate(name) == nil {
			continue
		}
		query := r.URL.Query()
		t := cloud.Tenant{Org: cloud.OrgID(query.Get("org_id")), Project: cloud.ProjectID(query.Get("project_id"))}
		switch id, err := resolve(r.Context(), t, name); {
		case err == nil:
			if ids == nil {
				ids = maps.Clone(vars)
			}
			ids[variable] = id
		case !fault.Is(err, fault.PermissionDenied) && !fault.Is(err, fault.InvalidArgument):
			return r, err
		}
	}
	if ids == nil {
		return r, nil
	}
	return mux.SetURLVars(r, ids), nil
}
