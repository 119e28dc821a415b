package raftconf

// Position is the place of an entry: terms never shrink along a log, so index and term name one entry of the group.
type Position struct{ Index, Term uint64 }
