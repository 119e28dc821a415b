package consensus

// position is the place of an entry: terms never shrink along a log, so index and term name one entry of the group.
type position struct{ index, term uint64 }
