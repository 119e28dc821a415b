package backup

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// The archive format of earlier versions has these fields, with their sizes in bytes:
//
//	magic, 10 bytes | key ID, 8 | salt, 16 | pieces: length of the ciphertext, 4, big endian; ciphertext, AES-256-GCM
//
// Each archive has its own key, which is derived from the given key and the salt. The nonce of a piece is the number of
// the piece. The additional data says whether the piece is the last one. So any piece that was changed, moved, dropped
// or added is detected, and so is a truncated archive. The key ID serves to distinguish a wrong key from a damaged
// archive; it reveals nothing about the key.
const (
	magic    = "TRIVETBK1\n"
	idLen    = 8
	saltLen  = 16
	pieceLen = 64 << 10
)

// The additional data (AEAD) of a piece. It says whether the piece is the last one of the archive.
var (
	notLast = []byte{0}
	isLast  = []byte{1}
)

// keys derives two values: the key ID from key alone, and the cipher of one archive from key and the archive's salt.
func keys(key, salt []byte) (id []byte, aead cipher.AEAD, err error) {
	if len(key) != sha256.Size {
		return nil, nil, fmt.Errorf("the key of archives has %d bytes, want %d", len(key), sha256.Size)
	}
	if id, err = hkdf.Key(sha256.New, key, nil, "trivet/backup/id", idLen); err != nil {
		return nil, nil, err
	}
	own, err := hkdf.Key(sha256.New, key, salt, "trivet/backup/archive", 32)
	if err != nil {
		return nil, nil, err
	}
	block, err := aes.NewCipher(own)
	if err != nil {
		return nil, nil, err
	}
	aead, err = cipher.NewGCM(block)
	return id, aead, err
}

func nonce(number uint64) []byte {
	return binary.BigEndian.AppendUint64(make([]byte, 4, 12), number)
}

// opener decrypts an archive in the format of earlier versions. It is an io.Reader that decrypts one piece at a time.
type opener struct {
	r      io.Reader
	aead   cipher.AEAD
	number uint64
	at     int64 // bytes read from r
	plain  []byte
	last   bool
	err    error
}

func newOpener(r io.Reader, key []byte) (*opener, error) {
	head := make([]byte, len(magic)+idLen+saltLen)
	if _, err := io.ReadFull(r, head); err != nil || string(head[:len(magic)]) != magic {
		return nil, errNotArchive
	}
	id, aead, err := keys(key, head[len(magic)+idLen:])
	if err != nil {
		return nil, err
	}
	if string(id) != string(head[len(magic):len(magic)+idLen]) {
		return nil, errors.New("the archive was made with another cluster key")
	}
	return &opener{r: r, aead: aead, at: int64(len(head))}, nil
}

func (o *opener) Read(p []byte) (int, error) {
	for len(o.plain) == 0 {
		if o.err == nil {
			o.err = o.piece()
		}
		if o.err != nil {
			return 0, o.err
		}
	}
	n := copy(p, o.plain)
	o.plain = o.plain[n:]
	return n, nil
}

// piece reads the next piece and decrypts it into the field plain. It returns io.EOF after the last piece.
func (o *opener) piece() error {
	var length [4]byte
	switch n, err := io.ReadFull(o.r, length[:]); {
	case o.last && n > 0:
		return fmt.Errorf("the archive is damaged: something follows its end at byte %d", o.at)
	case o.last && errors.Is(err, io.EOF):
		return io.EOF
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("the archive is cut short at byte %d", o.at+int64(n))
	case err != nil:
		return fmt.Errorf("read the archive: %w", err)
	}
	size := int(binary.BigEndian.Uint32(length[:]))
	if size < o.aead.Overhead() || size > pieceLen+o.aead.Overhead() {
		return fmt.Errorf("the archive is damaged at byte %d", o.at)
	}
	sealed := make([]byte, size)
	if n, err := io.ReadFull(o.r, sealed); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("the archive is cut short at byte %d", o.at+4+int64(n))
	} else if err != nil {
		return fmt.Errorf("read the archive: %w", err)
	}
	plain, err := o.aead.Open(nil, nonce(o.number), sealed, notLast)
	if err != nil {
		if plain, err = o.aead.Open(nil, nonce(o.number), sealed, isLast); err != nil {
			return fmt.Errorf("the archive is damaged, or was changed, at byte %d", o.at)
		}
		o.last = true
	}
	o.number++
	o.at += 4 + int64(size)
	o.plain = plain
	return nil
}
