package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

// savedUpload is the state of an upload that a later run of the command continues. It is stored as JSON in the
// directory uploads beside the file of saved logins, under a hash of the org, the name of the image and the path of the
// file.
type savedUpload struct {
	Image   string    `json:"image_id"`
	Session string    `json:"upload_session_id"`
	File    string    `json:"file"`
	Size    int64     `json:"size_bytes"`
	Changed time.Time `json:"modified_at"`
}

// resume continues the saved upload of a file. It begins a new upload if none is saved or the saved one cannot be
// continued.
func (u *upload) resume(ctx context.Context, path string, info fs.FileInfo) error {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("make %s absolute: %w", path, err)
	}
	book, err := account.Path(u.s.Env)
	if err != nil {
		return err
	}
	sum := sha256.Sum256([]byte(u.req.GetOrgId() + "\x00" + u.req.GetName() + "\x00" + absolute))
	u.path = filepath.Join(filepath.Dir(book), "uploads", hex.EncodeToString(sum[:16])+".json")
	saved, err := loadUpload(u.path)
	if err != nil {
		return err
	}
	if saved != nil && saved.Size == info.Size() && saved.Changed.Equal(info.ModTime()) {
		u.state = *saved
		open, err := u.listStored(ctx)
		if err != nil {
			return err
		}
		if open {
			u.s.Note("continuing the upload of %s; parts already stored: %s", u.req.GetName(), u.countStored())
			return nil
		}
	} else if saved != nil {
		u.s.Note("%s has changed since its upload was interrupted: `trivet image delete %s` removes that upload", path, saved.Image)
	}
	if err := u.begin(ctx); err != nil {
		return err
	}
	u.state.File, u.state.Size, u.state.Changed = absolute, info.Size(), info.ModTime()
	text, err := json.Marshal(u.state)
	if err != nil {
		return fmt.Errorf("save the upload: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(u.path), 0o700); err != nil {
		return fmt.Errorf("save the upload: %w", err)
	}
	return atomicfile.WriteFile(u.path, text, 0o600)
}

// loadUpload reads a saved upload. It returns nil if no upload is saved at the path.
func loadUpload(path string) (*savedUpload, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the saved upload: %w", err)
	}
	var saved savedUpload
	if err := json.Unmarshal(text, &saved); err != nil {
		return nil, fmt.Errorf("read the saved upload %s: %w", path, err)
	}
	return &saved, nil
}

// countStored returns the number of parts that the control plane stores, for a message.
func (u *upload) countStored() string {
	if u.completed {
		return "all"
	}
	return strconv.Itoa(len(u.stored))
}
