package network

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// page is the part of a list request that all resources have in common. Name selects resources with that name; empty
// means all.
type page struct {
	Size  int32
	Token string
	Name  string
}

// listing is a list of a project's resources of one kind. The functions below return a page of it and the token of the
// next page. They read different indexes, but return the same resources in the same order, and a token from one
// function is valid for the others. So a member that runs another version may read another index.
type listing[T any] struct {
	kind  string
	table store.Table[T]
	t     cloud.Tenant
	page  page
	// filter has all arguments of the list other than the name. Tokens are valid for a list with the same arguments.
	filter string
	// keep selects resources. It does not check the name.
	keep func(*T) bool
	// name returns the name of a resource.
	name func(*T) string
	// complete, if not nil, adds to a resource what is not in its record.
	complete func(store.Reader, *T) error
}

// list reads all records of the project.
func list[T any](ctx context.Context, s *Service, l listing[T]) ([]*T, string, error) {
	return store.PageOfIndex(ctx, s.opts.Store, l.table, l.request(), store.Indexed[T, T]{
		Table: l.table, Path: []string{string(l.t.Project)},
		ID:   func(r store.Record[T]) string { return r.Path[1] },
		Find: func(v *store.View, r store.Record[T]) (*T, error) { return l.check(v, r.Value) },
	}, string(l.t.Project))
}

// listAll is like list for the resources of all projects within l.t, in the order of project and ID. l.page.Name is
// ignored. tenant returns the tenant of a resource.
func listAll[T any](ctx context.Context, s *Service, l listing[T], tenant func(*T) cloud.Tenant) ([]*T, string, error) {
	l.page.Name = ""
	req := l.request()
	req.Query = "network, all projects\x00" + l.t.String()
	return store.Page(ctx, s.opts.Store, l.table, req, func(o *T) bool { return l.t.Contains(tenant(o)) })
}

// listOf is like list, but reads only those records whose IDs an index has below owner, at <owner>/<id>. The owner may
// be of another project: records of other projects are left out.
func listOf[I, T any](
	ctx context.Context, s *Service, l listing[T], index store.Table[I], owner string,
) ([]*T, string, error) {
	return store.PageOfIndex(ctx, s.opts.Store, index, l.request(), store.Indexed[I, T]{
		Table: l.table, Path: []string{string(l.t.Project)},
		ID:   func(e store.Record[I]) string { return e.Path[1] },
		Find: func(v *store.View, e store.Record[I]) (*T, error) { return l.find(v, e.Path[1]) },
	}, owner)
}

// listNamed is like list for a request with a name, which at most one resource of a kind has. It reads no others.
func listNamed[T any](ctx context.Context, s *Service, l listing[T]) ([]*T, string, error) {
	req := l.request()
	req.Only = []string{string(l.t.Project), l.kind, l.page.Name}
	return store.PageOfIndex(ctx, s.opts.Store, names, req, store.Indexed[string, T]{
		Table: l.table, Path: []string{string(l.t.Project)},
		ID:   func(e store.Record[string]) string { return *e.Value },
		Find: func(v *store.View, e store.Record[string]) (*T, error) { return l.find(v, *e.Value) },
	}, string(l.t.Project), l.kind)
}

// listIn returns a page of the resources with the name of the page request and of a VPC. Both are optional. index lists
// the resources of a VPC at <vpc>/<id>. listIn reads the index with the fewest entries.
func listIn[I, T any](
	ctx context.Context, s *Service, l listing[T], index store.Table[I], vpc cloud.VPCID,
) ([]*T, string, error) {
	l.filter = string(vpc)
	switch {
	case l.page.Name != "":
		return listNamed(ctx, s, l)
	case vpc != "":
		return listOf(ctx, s, l, index, string(vpc))
	}
	return list(ctx, s, l)
}

// find returns the project's record with an ID. It returns nil if there is no such record, or if the list does not
// select it.
func (l *listing[T]) find(v *store.View, id string) (*T, error) {
	record, err := l.table.Get(v, string(l.t.Project), id)
	if err != nil || record == nil {
		return nil, err
	}
	return l.check(v, record)
}

// check returns the completed record, or nil if the list does not select it.
func (l *listing[T]) check(v *store.View, record *T) (*T, error) {
	if l.page.Name != "" && l.name(record) != l.page.Name || !l.keep(record) {
		return nil, nil
	}
	if l.complete == nil {
		return record, nil
	}
	return record, l.complete(v, record)
}

// request returns the page request for the store.
func (l *listing[T]) request() store.PageRequest {
	return store.PageRequest{
		Size: l.page.Size, Token: l.page.Token, Query: fmt.Sprintf("network\x00%s\x00%s", l.page.Name, l.filter),
	}
}
