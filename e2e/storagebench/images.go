package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// pollInterval is the interval at which the status of an image is polled: the resolution of the time of an import.
const pollInterval = 10 * time.Millisecond

// randomFile makes a file of random bytes, which cannot be compressed.
func randomFile(path string, mib int) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, rand.Reader, int64(mib)<<20)
	return errors.Join(err, f.Sync(), f.Close())
}

// run runs a program and returns its CPU time and its standard output. env is added to the environment.
func run(ctx context.Context, env []string, name string, args ...string) (time.Duration, []byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		return 0, nil, fmt.Errorf("%s %s: %w: %s", filepath.Base(name), args[0], err, failed.Stderr)
	}
	if err != nil {
		return 0, nil, err
	}
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), out, nil
}

// syncFile flushes a file to the disk.
func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// membersCPU calls do and returns the CPU time that the members have used meanwhile.
func (s *site) membersCPU(do func() error) (time.Duration, error) {
	before, err := usage.Of(s.cloud.Members()...)
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	after, err := usage.Of(s.cloud.Members()...)
	return after.Since(before).CPU, err
}

// deleteImage deletes an image.
func (s *site) deleteImage(ctx context.Context, id string) error {
	_, err := s.cloud.Admin.Images.DeleteImage(ctx, &vmv1.DeleteImageRequest{OrgId: onehost.Org, ImageId: id})
	return err
}

// measureImport imports a VMDK image, which the control plane converts to QCOW2.
func measureImport(ctx context.Context, s *site) error {
	raw := filepath.Join(s.dir, "import.raw")
	if err := randomFile(raw, s.size.imageMiB); err != nil {
		return err
	}
	defer os.Remove(raw)
	source, err := filepath.Abs(filepath.Join(s.cloud.Trio.ImportDir(), "bench.vmdk"))
	if err != nil {
		return err
	}
	if _, _, err := run(ctx, nil, "qemu-img", "convert", "-f", "raw", "-O", "vmdk", raw, source); err != nil {
		return err
	}
	defer os.Remove(source)
	if err := errors.Join(os.Chmod(source, 0o644), syncFile(source)); err != nil {
		return err
	}
	s.results.Note("import", "Trivet also computes checksums, and a majority of three members on the same disk stores the image")
	return s.InTurn(ctx, s.fewer(),
		func(round int) error { return s.importOurs(ctx, source, round) },
		func(int) error { return s.convertByHand(ctx, source) },
	)
}

func (s *site) importOurs(ctx context.Context, source string, round int) error {
	var id string
	began := time.Now()
	cpu, err := s.membersCPU(func() error {
		made, err := s.cloud.Admin.Images.CreateImage(ctx, &vmv1.CreateImageRequest{
			Name: fmt.Sprintf("import-%d", round), OrgId: onehost.Org, Format: vmv1.ImageFormat_IMAGE_FORMAT_VMDK,
			Visibility: vmv1.Visibility_VISIBILITY_PUBLIC, OsType: vmv1.OsType_OS_TYPE_LINUX,
			Architecture: vmv1.Architecture_ARCHITECTURE_X86_64, SourceUrl: "file://" + source,
		})
		if err != nil {
			return err
		}
		id = made.GetId()
		return s.awaitImage(ctx, id)
	})
	if err != nil {
		return err
	}
	s.results.Ours("import", time.Since(began).Seconds())
	s.results.Ours("import cpu", cpu.Seconds())
	return s.deleteImage(ctx, id)
}

// awaitImage waits until an image is AVAILABLE.
func (s *site) awaitImage(ctx context.Context, id string) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		i, err := s.cloud.Admin.Images.GetImage(ctx, &vmv1.GetImageRequest{OrgId: onehost.Org, ImageId: id})
		switch {
		case err != nil:
			return err
		case i.GetStatus() == vmv1.ImageStatus_IMAGE_STATUS_AVAILABLE:
			return nil
		case i.GetStatus() == vmv1.ImageStatus_IMAGE_STATUS_ERROR:
			return fmt.Errorf("the image is in ERROR: %s", i.GetMetadata()["trivet/error"])
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *site) convertByHand(ctx context.Context, source string) error {
	to := filepath.Join(s.dir, "converted.qcow2")
	began := time.Now()
	cpu, _, err := run(ctx, nil, "qemu-img", "convert", "-f", "vmdk", "-O", "qcow2", source, to)
	if err != nil {
		return err
	}
	if err := syncFile(to); err != nil {
		return err
	}
	s.results.Peer("import", time.Since(began).Seconds())
	s.results.Peer("import cpu", cpu.Seconds())
	return os.Remove(to)
}

// measureUpload uploads a file with the program trivet.
func measureUpload(ctx context.Context, s *site) error {
	file := filepath.Join(s.dir, "upload.raw")
	if err := randomFile(file, s.size.imageMiB); err != nil {
		return err
	}
	defer os.Remove(file)
	token, err := s.cloud.Trio.AdminToken()
	if err != nil {
		return err
	}
	home := filepath.Join(s.dir, "home")
	if err := os.MkdirAll(home, 0o700); err != nil {
		return err
	}
	tokenFile := filepath.Join(home, "token")
	if err := os.WriteFile(tokenFile, []byte(token), 0o600); err != nil {
		return err
	}
	env := []string{
		"HOME=" + home, "XDG_CONFIG_HOME=" + home, "TRIVET_TOKEN_FILE=" + tokenFile, "TRIVET_ORG=" + onehost.Org,
		"TRIVET_ENDPOINT=127.0.0.1,127.0.0.2,127.0.0.3",
	}
	s.results.Note("upload", "a majority of three members on the same disk stores the image")
	return s.InTurn(ctx, s.fewer(),
		func(round int) error { return s.uploadOurs(ctx, env, file, round) },
		func(int) error { return s.copyByHand(ctx, file) },
	)
}

func (s *site) megabytesPerSecond(took time.Duration) float64 {
	return float64(s.size.imageMiB<<20) / 1e6 / took.Seconds()
}

func (s *site) uploadOurs(ctx context.Context, env []string, file string, round int) error {
	var image struct{ ID string }
	var client time.Duration
	began := time.Now()
	cpu, err := s.membersCPU(func() error {
		used, out, err := run(ctx, env, s.bin.CLI, "image", "upload", fmt.Sprintf("upload-%d", round), file, "-o", "json")
		if err != nil {
			return err
		}
		client = used
		return json.Unmarshal(out, &image)
	})
	if err != nil {
		return err
	}
	s.results.Ours("upload", s.megabytesPerSecond(time.Since(began)))
	s.results.Ours("upload cpu", (cpu + client).Seconds())
	return s.deleteImage(ctx, image.ID)
}

func (s *site) copyByHand(ctx context.Context, file string) error {
	to := filepath.Join(s.dir, "copied.raw")
	began := time.Now()
	copying, _, err := run(ctx, nil, "cp", "--reflink=never", file, to)
	if err != nil {
		return err
	}
	if err := syncFile(to); err != nil {
		return err
	}
	summing, _, err := run(ctx, nil, "sha256sum", to)
	if err != nil {
		return err
	}
	s.results.Peer("upload", s.megabytesPerSecond(time.Since(began)))
	s.results.Peer("upload cpu", (copying + summing).Seconds())
	return os.Remove(to)
}
