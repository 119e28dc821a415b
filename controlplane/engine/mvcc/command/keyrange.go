package command

import (
	"bytes"
)

func IsFromKey(end []byte) bool { return len(end) == 1 && end[0] == 0 }

// inRange reports whether key is in [start, end) as the API writes it.
func InRange(key, start, end []byte) bool {
	if len(end) == 0 {
		return bytes.Equal(key, start)
	}
	return bytes.Compare(key, start) >= 0 && (IsFromKey(end) || bytes.Compare(key, end) < 0)
}

// emptyRange reports whether no key can be in [key, end).
func EmptyRange(key, end []byte) bool {
	return len(end) > 0 && !IsFromKey(end) && bytes.Compare(key, end) >= 0
}

// PrefixEnd is the End of the range of all keys that begin with prefix: {0}, from the key on, when no key sorts after them.
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
