package raftconf

// MembershipAt is a membership and the entry that brought it.
type MembershipAt struct {
	Index uint64
	Membership
}

// History is the membership over the entries of a log: the first is what was when the log began.
type History []MembershipAt

// At is the membership as of an entry.
func (h History) At(index uint64) Membership {
	for i := len(h) - 1; i > 0; i-- {
		if h[i].Index <= index {
			return h[i].Membership
		}
	}
	return h[0].Membership
}

// TruncateTo forgets what was before an entry.
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
