package raftconf

// MembershipAt is a membership and the index of the first entry as of which it is valid.
type MembershipAt struct {
	Index uint64
	Membership
}

// History lists the memberships that were valid in the course of a log, ordered by index. The first element is the
// membership where the log begins.
type History []MembershipAt

// At returns the membership that is valid as of the entry at index. If index is before the first element, it returns
// the membership of the first element.
func (h History) At(index uint64) Membership {
	for i := len(h) - 1; i > 0; i-- {
		if h[i].Index <= index {
			return h[i].Membership
		}
	}
	return h[0].Membership
}

// TruncateTo returns the history of a log that is truncated so that it begins at index.
func (h History) TruncateTo(index uint64) History {
	first := MembershipAt{index, h.At(index)}
	out := History{first}
	for _, m := range h[1:] {
		if m.Index > index {
			out = append(out, m)
		}
	}
	return out
}
