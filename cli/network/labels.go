package network

import (
	"cmp"
	"context"
	"strings"
)

// labels finds the names of resources for output. It caches them.
type labels struct {
	get   func(k lister, id string) string
	list  func(k lister) map[string]string
	kinds map[string]*known
	// listed is true if the names of a kind are always listed. get is then nil.
	listed bool
}

// known holds the names of the resources of a kind, by ID.
type known struct {
	names  map[string]string
	listed bool
}

// fewGets is the number of names of a kind that labels reads one by one. Then it lists the kind.
const fewGets = 2

// lister is implemented by every kind.
type lister interface {
	names(context.Context, *target) (map[string]string, error)
	namesInAll(context.Context, *target) (map[string]string, error)
	nameByID(ctx context.Context, t *target, id string) (string, error)
	kindName() string
}

// labels returns the names of resources for output. It ignores errors of its calls: output then has IDs instead of
// names, as for a VPC of another project.
func (t *target) labels(ctx context.Context) *labels {
	return &labels{
		kinds: map[string]*known{},
		get: func(k lister, id string) string {
			name, _ := k.nameByID(ctx, t, id)
			return name
		},
		list: func(k lister) map[string]string {
			names, _ := k.names(ctx, t)
			return names
		},
	}
}

// labelsInAll is like labels, for resources of all projects.
func (t *target) labelsInAll(ctx context.Context) *labels {
	return &labels{
		kinds:  map[string]*known{},
		listed: true,
		list: func(k lister) map[string]string {
			names, _ := k.namesInAll(ctx, t)
			return names
		},
	}
}

// of returns the name of the object with an ID, or the ID if the object has no name or cannot be read.
func (l *labels) of(k lister, id string) string {
	if id == "" {
		return ""
	}
	have := l.kinds[k.kindName()]
	if have == nil {
		have = &known{names: map[string]string{}}
		l.kinds[k.kindName()] = have
	}
	if name, ok := have.names[id]; ok || have.listed {
		return cmp.Or(name, id)
	}
	if !l.listed && len(have.names) < fewGets {
		have.names[id] = cmp.Or(l.get(k, id), id)
		return have.names[id]
	}
	have.listed = true
	if all := l.list(k); all != nil {
		have.names = all
	}
	return cmp.Or(have.names[id], id)
}

// all returns the names of the objects with these IDs, separated by commas.
func (l *labels) all(k lister, ids []string) string {
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = l.of(k, id)
	}
	return strings.Join(names, ", ")
}
