package guest

import "strconv"

// SectorSize is the unit of Pattern and of the offsets and lengths in the guest's disk commands.
const SectorSize = 512

// Pattern fills buf with the data that the guest's "write" command writes at byte offset off of a disk. off and
// len(buf) must be multiples of SectorSize. Each sector begins with the seed and its own sector number and is padded
// with dots, so that a sector that was lost, stale or written elsewhere changes the checksum of the range.
func Pattern(buf []byte, seed string, off int64) {
	var head []byte
	for len(buf) >= SectorSize {
		head = append(head[:0], seed...)
		head = append(head, ' ')
		head = strconv.AppendInt(head, off/SectorSize, 10)
		head = append(head, '\n')
		n := copy(buf[:SectorSize], head)
		for i := n; i < SectorSize; i++ {
			buf[i] = '.'
		}
		buf, off = buf[SectorSize:], off+SectorSize
	}
}
