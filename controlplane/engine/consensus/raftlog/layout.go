package raftlog

import "encoding/binary"

// The keys of the log engine. Numbers in keys are 8 bytes, big endian, so that keys are ordered by number.
//
//	f                      version of this layout (uvarint)
//	b                      the Directory
//	m <member>             the only directory ID of another member from which messages are accepted
//	g <group> h            HardState
//	g <group> l <index>    an entry: type, term, data
//	g <group> s            LogStart of a snapshot that is being installed (the marker)
//	g <group> t            LogStart of the log
const (
	layoutVersion = 2

	keyFormat    = "f"
	keyDirectory = "b"
	keyPeer      = 'm'
	keyGroup     = 'g'
	kindHard     = 'h'
	kindEntry    = 'l'
	kindMarker   = 's'
	kindTrunc    = 't'
)

func groupKey(group uint64, kind byte) []byte {
	k := make([]byte, 10)
	k[0] = keyGroup
	binary.BigEndian.PutUint64(k[1:], group)
	k[9] = kind
	return k
}

const entryKeyLen = 18

func putEntryKey(k []byte, group, index uint64) {
	k[0] = keyGroup
	binary.BigEndian.PutUint64(k[1:], group)
	k[9] = kindEntry
	binary.BigEndian.PutUint64(k[10:], index)
}

func entryKey(group, index uint64) []byte {
	k := make([]byte, entryKeyLen)
	putEntryKey(k, group, index)
	return k
}

func peerKey(id uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{keyPeer}, id)
}
