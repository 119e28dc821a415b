// Package wire translates between the domain (package cloud) and the protobuf contracts, one file a noun. A test walks
// every field by reflection, so that a field added on one side and forgotten on the other fails.
//
// It decides nothing: no defaults, no checks but those without which a value has no counterpart.
package convert

import (
	"slices"
)

// clone copies a map, keeping nil and empty as nil: proto3 cannot tell them apart.
func clone(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	out := make(map[string]string, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}

// each maps a slice, nil for an empty one.
func each[A, B any](in []A, f func(A) B) []B {
	if len(in) == 0 {
		return nil
	}
	out := make([]B, len(in))
	for i, a := range in {
		out[i] = f(a)
	}
	return out
}

func copied(in []string) []string {
	if len(in) == 0 {
		return nil
	}
	return slices.Clone(in)
}
