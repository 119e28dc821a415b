package command

import (
	"bytes"
	"cmp"
)

// Holds reports whether c holds for a key with metadata m and value. The value is only used by CompareValue.
func (c *Compare) Holds(m Meta, value []byte) bool {
	var order int
	switch c.Target {
	case CompareVersion:
		order = cmp.Compare(m.Version, c.Number)
	case CompareCreate:
		order = cmp.Compare(m.CreateRevision, c.Number)
	case CompareMod:
		order = cmp.Compare(m.ModRevision, c.Number)
	case CompareLease:
		order = cmp.Compare(m.Lease, c.Number)
	case CompareValue:
		if !m.Live() {
			return false
		}
		order = bytes.Compare(value, c.Value)
	}
	switch c.Relation {
	case CompareEqual:
		return order == 0
	case CompareNotEqual:
		return order != 0
	case CompareGreater:
		return order > 0
	default:
		return order < 0
	}
}
