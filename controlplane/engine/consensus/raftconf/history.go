package raftconf

// MembershipAt is the membership that is valid from entry Index on.
type MembershipAt struct {
	Index uint64
	Membership
}

// History lists the memberships over the entries of a log, in the order of the index. The first element is the
// membership at the log's begin.
type History []MembershipAt

// At returns the membership as of entry index, or the oldest one if index is before the first element.
func (h History) At(index uint64) Membership {
	for i := len(h) - 1; i > 0; i-- {
		if h[i].Index <= index {
			return h[i].Membership
		}
	}
	return h[0].Membership
}

// TruncateTo returns the history of the log after it was truncated to begin at index.
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
