package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Encrypter makes the beginning of encrypted RBD images, because this package has no cryptography. The parameter id is
// the id of the volume, and key is the LUKS passphrase. The caller closes the files that the methods return.
type Encrypter interface {
	// Header returns a new file with a LUKS header.
	Header(ctx context.Context, id string, key []byte) (*os.File, error)
	// Encrypt returns a new file with a LUKS header, and behind it the encrypted content of an image, which has the
	// given format and virtual size.
	Encrypt(ctx context.Context, id string, key []byte, image *os.File, format qcow2.Format, size uint64) (*os.File, error)
}

// luksHeader is the length in bytes of the LUKS headers that QEMU makes for its standard cipher (AES-256 in XTS mode).
// Each RBD image of an encrypted volume begins with a header. The guest sees the content behind the header.
const luksHeader = 4040 * 512

// headerOf returns the length of the LUKS header of a new volume: 0 if the volume is not encrypted. The bytes of a
// volume that is made from a snapshot are those of the snapshot, so both must be encrypted, or none.
func (p *RBDPool) headerOf(ctx context.Context, v Volume) (uint64, error) {
	switch {
	case v.Source != nil:
		r, _, err := p.read(ctx, v.Source.Volume)
		if err != nil {
			return 0, fmt.Errorf("snapshot %s: %w", v.Source.ID, err)
		}
		if r.Encrypted != v.Encrypted {
			return 0, fmt.Errorf("%w: only one of the snapshot %s and the required volume is encrypted", ErrRefused, v.Source.ID)
		}
		return r.Header, nil
	case v.Encrypted:
		return luksHeader, nil
	}
	return 0, nil
}

// makeEncrypted makes the RBD image of an encrypted volume that is not made from a snapshot. If the volume has an
// image, makeEncrypted copies the image, because the content of a base image is not encrypted.
func (p *RBDPool) makeEncrypted(ctx context.Context, v Volume) error {
	switch {
	case p.o.Encrypter == nil:
		return fmt.Errorf("%w: this host cannot make encrypted volumes", ErrRefused)
	case len(v.Key) == 0:
		return ErrNoKey
	}
	name := p.name(volumeImage(v.ID))
	_, err := p.o.Client.GetImage(ctx, &rbdv1.GetImageRequest{Name: name})
	if !isCode(err, codes.NotFound) { // An earlier attempt has made the image, or the cluster does not answer.
		return rbdError(err)
	}
	ctx, cancel := context.WithTimeout(ctx, importWithin)
	defer cancel()
	return p.withLease(ctx, p.importLease(v.ID), func(ctx context.Context) error {
		content, size, err := p.encryptedContent(ctx, v)
		if err != nil {
			return err
		}
		defer content.Close()
		length, err := content.Seek(0, io.SeekEnd)
		if err != nil {
			return err
		}
		if uint64(length) != luksHeader+size {
			return fmt.Errorf("%w: the LUKS header that QEMU made has not %d bytes", ErrRefused, luksHeader)
		}
		err = rbd.Import(ctx, p.o.Client, name, luksHeader+v.Size, io.NewSectionReader(content, 0, length))
		if isCode(err, codes.AlreadyExists) { // Another host has made the image.
			return nil
		}
		return rbdError(err)
	})
}

// importLease returns the name of the record that prevents concurrent imports of a volume's RBD image (see withLease).
func (p *RBDPool) importLease(id string) *rbdv1.ImageName { return p.name(volumeImage(id) + ".import") }

// encryptedContent returns a file with the LUKS header of a new volume and the encrypted content of the volume's image.
// The result size is the length of the content behind the header.
func (p *RBDPool) encryptedContent(ctx context.Context, v Volume) (content *os.File, size uint64, err error) {
	if v.Image == nil {
		content, err = p.o.Encrypter.Header(ctx, v.ID, v.Key)
		return content, 0, err
	}
	if err := p.o.Images.Ensure(ctx, *v.Image); err != nil {
		return nil, 0, err
	}
	f, err := p.o.Images.Open(*v.Image)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	if size, err = virtualSize(f, *v.Image); err != nil {
		return nil, 0, err
	}
	if size > v.Size {
		return nil, 0, errTooSmall(size, v.Size)
	}
	if mutant.On(mutant.ImportPlainImage) {
		content, err = os.CreateTemp("", "")
		if err == nil {
			_, err = io.Copy(io.NewOffsetWriter(content, luksHeader), f)
			err = errors.Join(err, content.Truncate(int64(luksHeader+size)), os.Remove(content.Name()))
		}
		return content, size, err
	}
	content, err = p.o.Encrypter.Encrypt(ctx, v.ID, v.Key, f, v.Image.Format, size)
	return content, size, err
}

// removeImports removes what an interrupted makeEncrypted has left of a volume that is being deleted.
func (p *RBDPool) removeImports(ctx context.Context, id string) error {
	partial := &rbdv1.RemoveImageRequest{Name: p.name(volumeImage(id) + ".partial")}
	if _, err := p.o.Client.RemoveImage(ctx, partial); err != nil {
		return rbdError(err)
	}
	lease, err := p.o.Client.GetRecord(ctx, &rbdv1.GetRecordRequest{Name: p.importLease(id)})
	if err != nil || len(lease.GetData()) == 0 {
		return rbdError(err)
	}
	_, err = p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: p.importLease(id), Before: lease.GetData()})
	return rbdError(err)
}
