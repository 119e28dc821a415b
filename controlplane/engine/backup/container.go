package backup

import (
	"bufio"
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"

	"filippo.io/age"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ageMagic is the text with which every age file begins.
const ageMagic = "age-encryption.org/"

// workFactor is the logarithm (base 2) of the scrypt work factor. It is low, because the passphrase has 256 random bits
// and needs no protection against guessing. Archives with a higher work factor are refused.
const workFactor = 10

var errNotArchive = errors.New("this is not an archive that `trivet cluster backup` wrote")

// passphrase derives the passphrase of the age file from key. It returns an error if key does not have 32 bytes.
func passphrase(key []byte) (string, error) {
	if len(key) != sha256.Size {
		return "", fmt.Errorf("the key of archives has %d bytes, want %d", len(key), sha256.Size)
	}
	secret, err := hkdf.Key(sha256.New, key, nil, "trivet/backup/age", 32)
	return base64.RawURLEncoding.EncodeToString(secret), err
}

// encrypt returns a writer that encrypts to w. The archive is incomplete until the writer is closed.
func encrypt(w io.Writer, key []byte) (io.WriteCloser, error) {
	secret, err := passphrase(key)
	if err != nil {
		return nil, err
	}
	recipient, err := age.NewScryptRecipient(secret)
	if err != nil {
		return nil, err
	}
	recipient.SetWorkFactor(workFactor)
	return age.Encrypt(w, recipient)
}

// plainReader reads the decrypted content of an archive. Each byte that it returns is authenticated.
type plainReader struct {
	r io.Reader
	// err is the first error of r other than io.EOF. After it, every read returns err.
	err error
}

func (p *plainReader) Read(b []byte) (int, error) {
	if p.err != nil {
		return 0, p.err
	}
	n, err := p.r.Read(b)
	if err != nil && err != io.EOF {
		p.err = err
	}
	return n, err
}

// decrypt returns a reader of the decrypted content of an archive. The archive is an age file, or has the format of
// earlier versions (oldformat.go).
func decrypt(r io.Reader, key []byte) (*plainReader, error) {
	in := bufio.NewReader(r)
	head, err := in.Peek(max(len(ageMagic), len(magic)))
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("read the archive: %w", err)
	}
	if bytes.HasPrefix(head, []byte(magic)) {
		old, err := newOpener(in, key)
		return &plainReader{r: old}, err
	}
	if !bytes.HasPrefix(head, []byte(ageMagic)) {
		return nil, errNotArchive
	}
	secret, err := passphrase(key)
	if err != nil {
		return nil, err
	}
	identity, err := age.NewScryptIdentity(secret)
	if err != nil {
		return nil, err
	}
	identity.SetMaxWorkFactor(workFactor)
	source := &plainReader{r: in}
	plain, err := age.Decrypt(source, identity)
	var wrongKey *age.NoIdentityMatchError
	if errors.As(err, &wrongKey) && source.err == nil {
		return nil, errors.New("the archive was made with another cluster key, or its header is damaged")
	}
	opened := ageReader{plain, source}
	return &plainReader{r: opened}, opened.describe(err)
}

// ageReader reads the decrypted content of an age file. Its errors say whether the file could not be read or its
// content is damaged.
type ageReader struct {
	plain  io.Reader
	source *plainReader
}

func (a ageReader) Read(b []byte) (int, error) {
	n, err := a.plain.Read(b)
	return n, a.describe(err)
}

func (a ageReader) describe(err error) error {
	switch {
	case err == nil || err == io.EOF:
		return err
	case errors.Is(err, io.ErrUnexpectedEOF) && mutant.On(mutant.AcceptTruncated):
		return io.EOF
	case a.source.err != nil:
		return fmt.Errorf("read the archive: %w", a.source.err)
	}
	return fmt.Errorf("the archive is cut short, or is damaged, or was changed: %w", err)
}
