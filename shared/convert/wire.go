// Package convert translates between the domain types (package cloud) and the protobuf messages, one file per noun. A
// test visits every field by reflection, so that it fails if a field is added on one side only.
//
// The package applies no defaults. It validates nothing, except that the number of an enumeration becomes 255, which is
// not valid, if it is not within 0 to 254. The records of networks that agents receive are an exception: an agent writes
// them to the kernel as root, so network.go checks every value.
package convert

import (
	"slices"
)

// copyMap copies a map. It returns nil for an empty map, because proto3 cannot distinguish an empty map from none.
func copyMap(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	out := make(map[string]string, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}

// each returns a slice with f(e) for each element e of in. It returns nil for an empty slice.
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

func copySlice(in []string) []string {
	if len(in) == 0 {
		return nil
	}
	return slices.Clone(in)
}
