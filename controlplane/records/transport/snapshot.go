package transport

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// snapshotStall is the time without progress after which the transfer of a snapshot is canceled.
const snapshotStall = 30 * time.Second

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// SendSnapshot implements consensus.Transport. It sends the files in dir in the background, and reports the result to
// the runner.
func (m *Transport) SendSnapshot(e message.Envelope, dir string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ctx := m.ctx
	if ctx == nil {
		m.runner.ReportSnapshot(e.Group, e.To, false)
		return
	}
	m.sending.Go(func() {
		err := m.sendSnapshot(ctx, e, dir)
		if err != nil {
			m.opts.Log.Warn("snapshot was not delivered", "member", e.To, "group", e.Group, "err", err)
		}
		m.runner.ReportSnapshot(e.Group, e.To, err == nil)
	})
}

func (m *Transport) sendSnapshot(ctx context.Context, e message.Envelope, dir string) error {
	l := m.link(e.To)
	if l == nil {
		return errors.New("no such member")
	}
	select {
	case l.snapshots <- struct{}{}:
		defer func() { <-l.snapshots }()
	default:
		return errors.New("another is under way")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stalled := time.AfterFunc(snapshotStall, cancel)
	defer stalled.Stop()
	client, err := m.reach(ctx, e.To)
	if err != nil {
		return err
	}
	s, err := client.SendSnapshot(ctx)
	if err != nil {
		return err
	}
	frame, err := e.AppendTo(nil)
	if err != nil {
		return fmt.Errorf("encode envelope: %w", err)
	}
	if err := s.Send(&peerv1.SnapshotChunk{Envelope: frame}); err != nil {
		return refusal(s, err)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		return sendFile(path, name, func(c *peerv1.SnapshotChunk) error {
			stalled.Reset(snapshotStall)
			return s.Send(c)
		})
	})
	if err != nil {
		return refusal(s, fmt.Errorf("send files: %w", err))
	}
	stalled.Reset(snapshotStall)
	_, err = s.CloseAndRecv()
	return err
}

// refusal returns the error to report after Send has failed. If the receiver has ended the stream, Send returns only
// io.EOF, and refusal returns the status from the receiver. It returns other errors unchanged.
func refusal(s peerv1.PeerService_SendSnapshotClient, err error) error {
	if !errors.Is(err, io.EOF) {
		return err
	}
	if why := s.RecvMsg(&peerv1.SnapshotReceived{}); why != nil {
		return why
	}
	return err
}

func sendFile(path, name string, send func(*peerv1.SnapshotChunk) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := crc32.New(castagnoli)
	first := name
	err = Chunks(f, 0, func(b []byte) error {
		sum.Write(b)
		c := &peerv1.SnapshotChunk{File: first, Data: b}
		first = ""
		return send(c)
	})
	if err != nil {
		return err
	}
	return send(&peerv1.SnapshotChunk{File: first, Crc32C: sum.Sum32(), Last: true})
}

// receiveSnapshot writes the files that another member sends to a new directory. When all files are complete and their
// checksums match, it calls the runner's DeliverSnapshot with the directory.
func (m *Transport) receiveSnapshot(s peerv1.PeerService_SendSnapshotServer) (err error) {
	from, err := m.sender(s.Context())
	if err != nil {
		return err
	}
	l := m.link(from)
	if l == nil {
		return fault.New(fault.PermissionDenied, "member %d is not known here", from)
	}
	select {
	case l.arriving <- struct{}{}:
		defer func() { <-l.arriving }()
	default:
		return fault.New(fault.Unavailable, "other snapshots of member %d are arriving", from)
	}
	head, err := s.Recv()
	if err != nil {
		return err
	}
	e, err := m.accept(head.GetEnvelope(), from)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(m.runner.SnapshotDir(), "in-")
	if err != nil {
		return fmt.Errorf("make room for a snapshot: %w", err)
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dir)
		}
	}()
	for {
		c, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := receiveFile(dir, c, s.Recv); err != nil {
			return err
		}
	}
	if err := syncDirs(dir); err != nil {
		return err
	}
	if err := m.runner.DeliverSnapshot(e, dir); err != nil {
		return fmt.Errorf("install snapshot: %w", err)
	}
	return s.SendAndClose(&peerv1.SnapshotReceived{})
}

// receiveFile receives one file of a snapshot and writes it below dir. c is the first chunk of the file, which contains
// its name.
func receiveFile(dir string, c *peerv1.SnapshotChunk, recv func() (*peerv1.SnapshotChunk, error)) error {
	name := c.GetFile()
	if !filepath.IsLocal(name) {
		return fault.New(fault.InvalidArgument, "a snapshot's file cannot be called %q", name)
	}
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := crc32.New(castagnoli)
	for {
		sum.Write(c.GetData())
		if _, err := f.Write(c.GetData()); err != nil {
			return err
		}
		if c.GetLast() {
			break
		}
		if c, err = recv(); err != nil {
			return fmt.Errorf("file %s broke off: %w", name, err)
		}
		if c.GetFile() != "" {
			return fault.New(fault.InvalidArgument, "file %s has no end", name)
		}
	}
	if sum.Sum32() != c.GetCrc32C() {
		return fault.New(fault.InvalidArgument, "file %s was damaged on the way", name)
	}
	return f.Sync()
}

// syncDirs calls fsync on dir and all directories below it, so that the names of the received files are durable.
func syncDirs(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("sync directory: %w", err)
		}
		defer f.Close()
		if err := f.Sync(); err != nil {
			return fmt.Errorf("sync directory: %w", err)
		}
		return nil
	})
}
