package qemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// rootFS is the part of the host's file system that QEMU sees: its program, shared libraries and modules, and firmware.
// Nothing else of /usr is visible: no other programs, no /usr/local, no sources, no documentation.
type rootFS struct {
	Program string            // QEMU's path, with symbolic links resolved
	Code    []string          // directories of libraries and modules
	Data    []string          // directories of firmware, mounted noexec
	Links   map[string]string // symbolic links: path to target
}

// codeDirs are the directories that may hold QEMU's libraries and modules. On hosts with a merged /usr, /lib and /lib64
// are symbolic links.
var codeDirs = []string{"/usr/lib", "/usr/lib64", "/lib", "/lib64"}

// dataDirs are the directories that may hold QEMU's firmware on Debian, Ubuntu, Fedora, RHEL, SUSE, Arch and Alpine.
var dataDirs = []string{
	"/usr/share/qemu", "/usr/share/qemu-kvm", "/usr/share/seabios", "/usr/share/seavgabios", "/usr/share/vgabios", "/usr/share/sgabios",
	"/usr/share/ipxe", "/usr/share/ipxe.efi", "/usr/share/OVMF", "/usr/share/AAVMF", "/usr/share/edk2", "/usr/share/edk2-ovmf",
	"/usr/share/edk2.git", "/usr/share/qemu-efi-aarch64",
}

// findRootFS returns the directories and links of this host that the QEMU at path needs.
func findRootFS(path string) (rootFS, error) {
	r := rootFS{Links: map[string]string{}}
	var err error
	if r.Program, err = filepath.EvalSymlinks(path); err != nil {
		return rootFS{}, err
	}
	if !strings.HasPrefix(r.Program, "/usr/") || !strings.HasPrefix(path, "/usr/") {
		return rootFS{}, fmt.Errorf("%s must be installed under /usr", r.Program)
	}
	for _, dir := range codeDirs {
		st, err := os.Lstat(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return rootFS{}, err
		case st.Mode()&fs.ModeSymlink != 0:
			if r.Links[dir], err = os.Readlink(dir); err != nil {
				return rootFS{}, err
			}
		default:
			r.Code = append(r.Code, dir)
		}
	}
	for _, dir := range dataDirs {
		if st, err := os.Stat(dir); err == nil && st.IsDir() {
			r.Data = append(r.Data, dir)
		}
	}
	// QEMU finds its firmware relative to its program, so the path it is started with must exist.
	if path != r.Program {
		r.Links[path] = r.Program
	}
	return r, nil
}

// mount mounts the program and the directories of r in the empty directory root, at the same paths as on the host, and
// creates the symbolic links.
func (r rootFS) mount(root string) error {
	for _, dir := range r.Code {
		if err := bind(dir, filepath.Join(root, dir), true, true); err != nil {
			return fmt.Errorf("show %s: %w", dir, err)
		}
	}
	for _, dir := range r.Data {
		if err := bind(dir, filepath.Join(root, dir), true, false); err != nil {
			return fmt.Errorf("show %s: %w", dir, err)
		}
	}
	if err := r.mountProgram(root); err != nil {
		return fmt.Errorf("show %s: %w", r.Program, err)
	}
	for path, to := range r.Links {
		at := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return fmt.Errorf("make root: %w", err)
		}
		// A link whose path is in a mounted directory exists there already.
		if err := os.Symlink(to, at); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make root: %w", err)
		}
	}
	return nil
}

// mountProgram mounts the program, unless it is in a directory of r.Code, which is mounted already.
func (r rootFS) mountProgram(root string) error {
	for _, dir := range r.Code {
		if strings.HasPrefix(r.Program, dir+"/") {
			return nil
		}
	}
	return bind(r.Program, filepath.Join(root, r.Program), false, true)
}
