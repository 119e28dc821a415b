package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// NodeToken creates a token with which one node agent can join the cluster.
func (g *GRPC) NodeToken(ctx context.Context) (string, error) {
	t, err := g.Operator.CreateNodeToken(ctx, &operatorv1.CreateNodeTokenRequest{})
	return t.GetToken(), err
}

// AwaitNode waits until the host with that name is READY, and returns it. It returns an error if ctx ends first.
func (g *GRPC) AwaitNode(ctx context.Context, name string) (node *vmv1.Node, err error) {
	err = Until(ctx, "host "+name+" is READY", func(ctx context.Context) error {
		list, err := g.Nodes.ListNodes(ctx, &vmv1.ListNodesRequest{})
		if err != nil {
			return err
		}
		for _, n := range list.GetNodes() {
			if n.GetName() == name && n.GetState() == vmv1.NodeState_NODE_STATE_READY {
				node = n
				return nil
			}
		}
		return fmt.Errorf("it is not among the READY ones of %d", len(list.GetNodes()))
	})
	return node, err
}

// EnsureProject creates the org and, in it, the project, unless they exist. If org or project is "", it is not created.
func (g *GRPC) EnsureProject(ctx context.Context, org, project string) error {
	if org != "" {
		if _, err := g.Identity.CreateOrg(ctx, &identityv1.CreateOrgRequest{Id: org}); err != nil && status.Code(err) != codes.AlreadyExists {
			return err
		}
	}
	if project != "" {
		_, err := g.Identity.CreateProject(ctx, &identityv1.CreateProjectRequest{Id: project, OrgId: org})
		if err != nil && status.Code(err) != codes.AlreadyExists {
			return err
		}
	}
	return nil
}

// EnsureUser creates a user, if it does not exist, sets its password and grants it the role in binding. It also creates
// the binding's org and project, if they do not exist.
func (g *GRPC) EnsureUser(ctx context.Context, id, password string, binding *identityv1.Binding) error {
	if err := g.EnsureProject(ctx, binding.GetOrgId(), binding.GetProjectId()); err != nil {
		return err
	}
	if _, err := g.Identity.CreateUser(ctx, &identityv1.CreateUserRequest{Id: id, Name: id}); err != nil && status.Code(err) != codes.AlreadyExists {
		return err
	}
	if _, err := g.Identity.SetPassword(ctx, &identityv1.SetPasswordRequest{UserId: id, Password: password}); err != nil {
		return err
	}
	_, err := g.Identity.BindRole(ctx, &identityv1.BindRoleRequest{UserId: id, Binding: binding})
	return err
}

// GuestImages holds the ids of the three images from which the tests' small guest is booted.
type GuestImages struct{ Disk, Kernel, Initrd string }

// ImportGuest returns the ids of PUBLIC images that were created from the small guest's files in the directory guest.
// For each file, it reuses an AVAILABLE image with the same name and checksum. If there is none, it copies the file to
// the import directory and imports it.
func ImportGuest(ctx context.Context, t *Trio, g *GRPC, guest string) (out GuestImages, err error) {
	for _, i := range []struct {
		file, name string
		format     vmv1.ImageFormat
		id         *string
	}{
		{"disk.qcow2", "small", vmv1.ImageFormat_IMAGE_FORMAT_QCOW2, &out.Disk},
		{"vmlinuz", "small-kernel", vmv1.ImageFormat_IMAGE_FORMAT_RAW, &out.Kernel},
		{"initrd.lz4", "small-initrd", vmv1.ImageFormat_IMAGE_FORMAT_RAW, &out.Initrd},
	} {
		from := filepath.Join(guest, i.file)
		checksum, err := sum(from)
		if err != nil {
			return out, err
		}
		want := fmt.Sprintf("sha256:%x", checksum)
		if *i.id, err = g.findImage(ctx, i.name, want); err != nil {
			return out, err
		}
		if *i.id == "" {
			if *i.id, err = importFile(ctx, t, g, from, i.name, i.format); err != nil {
				return out, fmt.Errorf("import %s: %w", i.file, err)
			}
		}
	}
	return out, nil
}

// findImage returns the ID of the AVAILABLE image with a name and a checksum, or "". Images with the name and another
// checksum, from an earlier build, get another name, because names of images are unique.
func (g *GRPC) findImage(ctx context.Context, name, checksum string) (string, error) {
	list, err := g.Images.ListImages(ctx, &vmv1.ListImagesRequest{OrgId: "default", PageSize: 1000, IncludePublic: true})
	if err != nil {
		return "", err
	}
	for _, i := range list.GetImages() {
		switch {
		case i.GetName() != name || i.GetOrgId() != "default" || i.GetStatus() != vmv1.ImageStatus_IMAGE_STATUS_AVAILABLE:
		case i.GetChecksum() == checksum:
			return i.GetId(), nil
		default:
			sum := strings.TrimPrefix(i.GetChecksum(), "sha256:")
			old := &vmv1.UpdateImageRequest{OrgId: "default", ImageId: i.GetId(), Name: name + "-" + sum[:min(8, len(sum))]}
			if _, err := g.Images.UpdateImage(ctx, old); err != nil {
				return "", fmt.Errorf("rename the image %s of an earlier build: %w", name, err)
			}
		}
	}
	return "", nil
}

func importFile(ctx context.Context, t *Trio, g *GRPC, from, name string, format vmv1.ImageFormat) (string, error) {
	text, err := os.ReadFile(from)
	if err != nil {
		return "", err
	}
	path, err := filepath.Abs(filepath.Join(t.ImportDir(), filepath.Base(from)))
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return "", err
	}
	return ImportURL(ctx, g, &vmv1.CreateImageRequest{
		Name: name, OrgId: "default", Visibility: vmv1.Visibility_VISIBILITY_PUBLIC, Format: format, OsType: vmv1.OsType_OS_TYPE_LINUX,
		Architecture: vmv1.Architecture_ARCHITECTURE_X86_64, SourceUrl: "file://" + path,
	})
}

// ImportURL creates an image, waits until its status is AVAILABLE, and returns its id. If the status becomes ERROR,
// ImportURL returns an error with the reason from the image's metadata.
func ImportURL(ctx context.Context, g *GRPC, r *vmv1.CreateImageRequest) (string, error) {
	made, err := g.Images.CreateImage(ctx, r)
	if err != nil {
		return "", err
	}
	var failed error
	err = Until(ctx, "the image is AVAILABLE", func(ctx context.Context) error {
		i, err := g.Images.GetImage(ctx, &vmv1.GetImageRequest{OrgId: r.GetOrgId(), ImageId: made.GetId()})
		switch {
		case err != nil:
			return err
		case i.GetStatus() == vmv1.ImageStatus_IMAGE_STATUS_ERROR:
			failed = fmt.Errorf("the image is in ERROR: %s", i.GetMetadata()["trivet/error"])
			return nil
		case i.GetStatus() != vmv1.ImageStatus_IMAGE_STATUS_AVAILABLE:
			return fmt.Errorf("it is %s", i.GetStatus())
		}
		return nil
	})
	return made.GetId(), errors.Join(err, failed)
}

// Console waits until the console log of a VM of the project default has nth lines that contain text (nth is 1 or
// more), and returns the last of these lines. It returns an error if ctx ends first.
func (g *GRPC) Console(ctx context.Context, vm, text string, nth int) (string, error) {
	r := &operatorv1.ReadConsoleLogRequest{OrgId: "default", ProjectId: "default", VmId: vm, Follow: true}
	var line string
	err := Until(ctx, fmt.Sprintf("%q is on the console of VM %s", text, vm), func(ctx context.Context) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		s, err := g.Operator.ReadConsoleLog(ctx, r)
		if err != nil {
			return err
		}
		read, write := io.Pipe()
		go func() {
			for {
				piece, err := s.Recv()
				if err != nil {
					write.CloseWithError(err)
					return
				}
				if _, err := write.Write(piece.GetData()); err != nil {
					return
				}
			}
		}()
		defer read.Close()
		seen := 0
		for lines := bufio.NewScanner(read); ; {
			if !lines.Scan() {
				return fmt.Errorf("the console ended: %w", lines.Err())
			}
			if !strings.Contains(lines.Text(), text) {
				continue
			}
			if seen++; seen == nth {
				line = strings.TrimSpace(lines.Text())
				return nil
			}
		}
	})
	return line, err
}

// ReadConsole returns the current content of the console log of a VM of the project default.
func (g *GRPC) ReadConsole(ctx context.Context, vm string) (string, error) {
	s, err := g.Operator.ReadConsoleLog(ctx, &operatorv1.ReadConsoleLogRequest{OrgId: "default", ProjectId: "default", VmId: vm})
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for {
		piece, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return text.String(), nil
		}
		if err != nil {
			return text.String(), err
		}
		text.Write(piece.GetData())
	}
}

// Alive checks the pid that the API reports for a VM. It returns an error unless the process with that pid exists on
// this host and is no zombie.
func (g *GRPC) Alive(ctx context.Context, vm string) error {
	v, err := g.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: "default", ProjectId: "default", VmId: vm})
	if err != nil {
		return err
	}
	pid := int(v.GetStatus().GetHostPid())
	if start, state := startTime(pid); start == "" || state == "Z" {
		return fmt.Errorf("its process %d is gone", pid)
	}
	return nil
}
