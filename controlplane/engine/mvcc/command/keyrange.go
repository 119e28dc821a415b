package command

import (
	"bytes"
)

// IsFromKey reports whether end is {0}: the range has no upper bound.
func IsFromKey(end []byte) bool { return len(end) == 1 && end[0] == 0 }

// InRange reports whether key is in the range [start, end). An empty end means start alone, and {0} no upper bound.
func InRange(key, start, end []byte) bool {
	if len(end) == 0 {
		return bytes.Equal(key, start)
	}
	return bytes.Compare(key, start) >= 0 && (IsFromKey(end) || bytes.Compare(key, end) < 0)
}

// EmptyRange reports whether [key, end) cannot contain any key, since end is not after key.
func EmptyRange(key, end []byte) bool {
	return len(end) > 0 && !IsFromKey(end) && bytes.Compare(key, end) >= 0
}

// PrefixEnd returns the End of the range of all keys that begin with prefix. It is {0}, no upper bound, if prefix
// consists only of bytes 0xff.
func PrefixEnd(prefix []byte) []byte {
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] != 0xff {
			end := bytes.Clone(prefix[:i+1])
			end[i]++
			return end
		}
	}
	return []byte{0}
}
