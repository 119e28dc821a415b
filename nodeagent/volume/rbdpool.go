package volume

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// RBDOptions are the settings of an RBDPool. All but Encrypter are required.
type RBDOptions struct {
	// Client calls the helper that is connected to the Ceph cluster.
	Client rbdv1.RbdServiceClient
	// Monitors are addresses of the cluster's monitors, each an IP address and a port.
	Monitors []string
	// Pool is the name of the pool in the cluster.
	Pool string
	// User is the name of the Ceph user, and Key is its key in base64. QEMU opens images as this user.
	User, Key string
	// Images is the cache of the images that volumes are made from.
	Images *disk.Images
	// Encrypter makes encrypted volumes. If it is nil, the pool cannot make encrypted volumes.
	Encrypter Encrypter
}

// RBDPool stores volumes as RBD images in a pool of a Ceph cluster. Several hosts use the same pool. The methods of
// RBDPool are safe for concurrent use, on one host and on several.
type RBDPool struct {
	o RBDOptions
	// registered is the image of the only volume that the methods are called for, if that is a registered volume.
	registered string
}

// NewRBDPool returns an RBDPool. It does not call the helper.
func NewRBDPool(o RBDOptions) *RBDPool { return &RBDPool{o: o} }

// RBDImage names an RBD image, and contains the monitors, the user and the key with which QEMU opens it (librbd).
type RBDImage struct {
	Monitors []string // each an IP address and a port
	Pool     string
	Image    string
	User     string
	Key      string // in base64
}

func (p *RBDPool) name(image string) *rbdv1.ImageName {
	return &rbdv1.ImageName{Pool: p.o.Pool, Image: image}
}

// volumeImage returns the name of the RBD image of a volume that is not a registered one (see imageOf).
func volumeImage(id string) string { return "volume-" + id }

// errChanged means that another host changed the record of a volume between the read and the write of this host. A
// retry that reads the record again can succeed (see change).
var errChanged = errors.New("another host changed the record of the volume: try again")

// rbdError translates a gRPC error of RbdService. The result wraps ErrRefused if a retry cannot fix the error, and
// errChanged if the code is Aborted, for example because SetRecord found another record. The text of the result does
// not contain the gRPC code. rbdError returns other errors unchanged.
func rbdError(err error) error {
	s, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	switch s.Code() {
	case codes.Aborted:
		return errChanged
	case codes.InvalidArgument, codes.AlreadyExists:
		return fmt.Errorf("%w: %s", ErrRefused, s.Message())
	case codes.DeadlineExceeded, codes.Unavailable:
		return fmt.Errorf("the Ceph cluster does not answer: %s", s.Message())
	case codes.ResourceExhausted:
		return fmt.Errorf("the Ceph pool is full: %s", s.Message())
	case codes.PermissionDenied:
		return fmt.Errorf("the Ceph cluster refuses the user or its key: %s", s.Message())
	}
	return errors.New(s.Message())
}

// isCode reports whether err is a gRPC error with this code.
func isCode(err error, code codes.Code) bool { return err != nil && status.Code(err) == code }

// read reads the record of a volume. The result text is the stored form of the record, which the caller passes to
// write. The error wraps ErrNotFound if there is no record, or if it is that of another volume (otherVolumeError).
func (p *RBDPool) read(ctx context.Context, id string) (r record, text []byte, err error) {
	if err := checkID(id); err != nil {
		return r, nil, err
	}
	out, err := p.o.Client.GetRecord(ctx, &rbdv1.GetRecordRequest{Name: p.name(p.imageOf(id))})
	if err != nil {
		return r, nil, rbdError(err)
	}
	if text = out.GetData(); len(text) == 0 {
		return r, nil, ErrNotFound
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, nil, fmt.Errorf("read record: %w", err)
	}
	if err := r.checkVersion(); err != nil {
		return r, nil, err
	}
	return r, text, p.checkOwner(id, r)
}

// write replaces the record whose stored form is before, or makes the record if before is nil. It returns the stored
// form of the new record. The error wraps errChanged if the stored form of the current record is not before.
func (p *RBDPool) write(ctx context.Context, id string, before []byte, r record) ([]byte, error) {
	r.Version = recordVersion
	if len(r.Snapshots) > 0 || r.Source != nil || r.Encrypted {
		r.Version = recordVersion2
	}
	if r.Standby != nil || len(r.Former) > 0 || r.Activated > 0 {
		r.Version = recordVersion3
	}
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	// SetRecord compares only the beginning of the stored record. The newline ensures that no record begins with
	// another record.
	text = append(text, '\n')
	if bytes.Equal(before, text) {
		return text, nil
	}
	request := &rbdv1.SetRecordRequest{Name: p.name(p.imageOf(id)), Before: before, After: text}
	_, err = p.o.Client.SetRecord(ctx, request)
	if mutant.On(mutant.OverwriteRecord) && isCode(err, codes.Aborted) {
		now, _ := p.o.Client.GetRecord(ctx, &rbdv1.GetRecordRequest{Name: request.Name})
		request.Before = now.GetData()
		_, err = p.o.Client.SetRecord(ctx, request)
	}
	return text, rbdError(err)
}

// change calls f, and repeats the call while f returns errChanged, at most 5 times in all. f must read the record again
// in each call.
func (p *RBDPool) change(ctx context.Context, f func() error) error {
	const attempts = 5
	var err error
	for range attempts {
		if err = f(); !errors.Is(err, errChanged) {
			return err
		}
		if sleep(ctx, lockPause) != nil {
			break
		}
	}
	return err
}

// changeRecord calls f with the record of a volume and the record's stored form, which f passes to write. It repeats
// the call like change, with the record read again. If the volume has no record, changeRecord returns nil and does not
// call f. The error text begins with act, the name of the operation.
func (p *RBDPool) changeRecord(ctx context.Context, act, id string, f func(r record, text []byte) error) error {
	err := p.change(ctx, func() error {
		r, text, err := p.read(ctx, id)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return f(r, text)
	})
	if err != nil {
		return fmt.Errorf("%s volume %s: %w", act, id, err)
	}
	return nil
}

// image returns the properties of the RBD image of a volume. If the image does not exist, the error wraps ErrRefused.
func (p *RBDPool) image(ctx context.Context, id string) (*rbdv1.Image, error) {
	out, err := p.o.Client.GetImage(ctx, &rbdv1.GetImageRequest{Name: p.name(p.imageOf(id))})
	if isCode(err, codes.NotFound) && !strings.Contains(err.Error(), "open pool") {
		return nil, fmt.Errorf("%w: the volume's image is missing from the Ceph pool %s", ErrRefused, p.o.Pool)
	}
	return out, rbdError(err)
}

// Name returns the name of the pool in the Ceph cluster.
func (p *RBDPool) Name() string { return p.o.Pool }

// Status returns the description of one volume. The error wraps [ErrNotFound] if the pool does not have it.
func (p *RBDPool) Status(ctx context.Context, id string) (Status, error) {
	r, _, err := p.read(ctx, id)
	if err == nil && r.State != ready {
		err = ErrNotFound
	}
	if err != nil {
		return Status{}, fmt.Errorf("read volume %s: %w", id, err)
	}
	s := Status{ID: id, Size: r.Size, Image: r.Image, Encrypted: r.Encrypted, Attachment: r.Attachment, Flushed: r.Flushed,
		Flattened: r.Flattened, Clone: r.Source != nil, Format: qcow2.Raw}
	switch _, err := p.image(ctx, id); {
	case errors.Is(err, ErrRefused):
		s.Error = err.Error()
	case err != nil:
		return Status{}, fmt.Errorf("read volume %s: %w", id, err)
	}
	return s, nil
}
