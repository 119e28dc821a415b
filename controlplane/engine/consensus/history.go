package consensus

// membersAt is a membership and the entry that brought it.
type membersAt struct {
	index uint64
	membership
}

// history is the membership over the entries of a log: the first is what was when the log began.
type history []membersAt

// at is the membership as of an entry.
func (h history) at(index uint64) membership {
	for i := len(h) - 1; i > 0; i-- {
		if h[i].index <= index {
			return h[i].membership
		}
	}
	return h[0].membership
}

// cut forgets what was before an entry.
func (h history) cut(index uint64) history {
	first := membersAt{index, h.at(index)}
	out := history{first}
	for _, m := range h[1:] {
		if m.index > index {
			out = append(out, m)
		}
	}
	return out
}
