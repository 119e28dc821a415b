// Package message encodes what members of a raft group send to each other.
package message
