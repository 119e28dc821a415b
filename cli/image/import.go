package image

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// importTimeout is the deadline of `trivet image import` unless --timeout is given, enough for a large image on a
	// slow disk.
	importTimeout = 30 * time.Minute

	firstPoll = 100 * time.Millisecond
	lastPoll  = time.Second
)

// snapshotScheme begins a source that is a snapshot.
const snapshotScheme = "snapshot:"

type importFlags struct {
	public             bool
	sharedWith         []string
	format, os, arch   string
	osVersion          string
	minDisk, minMemory uint32
	metadata           []string
	sha256             string
	wait               session.Waiting
}

func importCommand(s *session.Session) *cobra.Command {
	var f importFlags
	c := &cobra.Command{
		Use:   "import NAME FILE|URL|snapshot:SNAPSHOT",
		Short: "Create an image from a file on a control plane host, an https URL, or a snapshot of a volume",
		Long: `Create an image from a file, an https:// URL, or a snapshot of a volume of the project, by name or ID. The control
plane reads the source, not this command: FILE is a path on the host of the member that serves the call (the first
--endpoint that can be reached), in one of that member's import directories. For a file on this host, use ` + "`trivet image upload`" + `.
The command waits until a majority of the members stores the image.`,
		Example: `  trivet image import debian /var/lib/trivet/import/debian-12.qcow2 --public
  trivet image import web-template snapshot:before-upgrade`,
		Args: session.Exactly("NAME", "FILE"),
	}
	f.add(c)
	c.ValidArgsFunction = completeFile
	c.RunE = s.Run(importTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		req, err := f.request(args[0], args[1])
		if err != nil {
			return err
		}
		if req.SourceUrl != args[1] {
			s.Note("the control plane reads %s on its own host, in its import directories", req.SourceUrl)
		}
		req.OrgId, _ = s.Tenant()
		if snapshot, ok := strings.CutPrefix(req.GetSourceUrl(), snapshotScheme); ok {
			id, err := FindSnapshot(ctx, s, conn, snapshot)
			if err != nil {
				return err
			}
			req.SourceUrl = snapshotScheme + id
		}
		image, err := f.run(ctx, s, vmv1.NewImageServiceClient(conn), req)
		if err != nil {
			return err
		}
		return printImage(ctx, s, image)
	})
	return c
}

// add adds the flags that describe a new image, and those for the wait.
func (f *importFlags) add(c *cobra.Command) {
	p := c.Flags()
	p.BoolVar(&f.public, "public", false, "share it with every org (requires system:admin)")
	p.StringSliceVar(&f.sharedWith, "shared-with", nil, "share it with these orgs: ORG,...")
	p.StringVar(&f.format, "format", "", "raw, qcow2, vmdk or vhd (default: detect)")
	p.StringVar(&f.os, "os", "", "operating system: linux, windows or bsd")
	p.StringVar(&f.osVersion, "os-version", "", "version of the operating system, such as 12.5")
	p.StringVar(&f.arch, "arch", "", "architecture: x86_64 or aarch64")
	p.Uint32Var(&f.minDisk, "min-disk", 0, "minimum disk size of a VM in GiB")
	p.Uint32Var(&f.minMemory, "min-memory", 0, "minimum memory of a VM in MiB")
	p.StringVar(&f.sha256, "sha256", "", "expected SHA-256 of the bytes: an image with other bytes is refused")
	p.StringArrayVar(&f.metadata, "metadata", nil, "KEY=VALUE, repeatable")
	f.wait.Add(c, true)
}

// completeFile completes the argument FILE with the names of files of this host. An import reads a file of a control
// plane host, and the command often runs on that host.
func completeFile(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 1 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// request returns the request that imports an image from a source.
func (f *importFlags) request(name, source string) (*vmv1.CreateImageRequest, error) {
	req, err := f.describe(name)
	if err != nil {
		return nil, err
	}
	req.SourceUrl, err = sourceURL(source)
	return req, err
}

// describe returns a request with all fields except the source.
func (f *importFlags) describe(name string) (*vmv1.CreateImageRequest, error) {
	if err := cloud.CheckName("NAME", name); err != nil {
		return nil, session.Usagef("%v", err)
	}
	req := &vmv1.CreateImageRequest{Name: name, OsVersion: f.osVersion, MinDiskGib: f.minDisk, MinMemoryMib: f.minMemory}
	var err, bad error
	enum := func(flag, given, prefix string, values map[string]int32) int32 {
		n, err := parse(flag, given, prefix, values)
		bad = errors.Join(bad, err)
		return n
	}
	req.Format = vmv1.ImageFormat(enum("format", f.format, "IMAGE_FORMAT", vmv1.ImageFormat_value))
	req.OsType = vmv1.OsType(enum("os", f.os, "OS_TYPE", vmv1.OsType_value))
	req.Architecture = vmv1.Architecture(enum("arch", f.arch, "ARCHITECTURE", vmv1.Architecture_value))
	if bad != nil {
		return nil, bad
	}
	if req.Metadata, err = session.Pairs("metadata", f.metadata); err != nil {
		return nil, err
	}
	if f.sha256 != "" {
		if req.Metadata == nil {
			req.Metadata = map[string]string{}
		}
		req.Metadata[cloud.SourceSHA256] = f.sha256
	}
	switch {
	case f.public && len(f.sharedWith) > 0:
		return nil, session.Usagef("give --public or --shared-with, not both")
	case f.public:
		req.Visibility = vmv1.Visibility_VISIBILITY_PUBLIC
	case len(f.sharedWith) > 0:
		req.Visibility = vmv1.Visibility_VISIBILITY_SHARED
		if req.Metadata == nil {
			req.Metadata = map[string]string{}
		}
		req.Metadata[cloud.SharedWith] = strings.Join(f.sharedWith, ",")
	}
	return req, nil
}

// parse returns the number of the enum value whose name is prefix, an underscore and the upper-case form of given. It
// returns 0 if given is empty, and a *Usage error that names the flag if there is no such value.
func parse(flag, given, prefix string, values map[string]int32) (int32, error) {
	if given == "" {
		return 0, nil
	}
	if n, ok := values[prefix+"_"+strings.ToUpper(given)]; ok && n != 0 {
		return n, nil
	}
	var known []string
	for name, n := range values {
		if n != 0 {
			known = append(known, strings.ToLower(strings.TrimPrefix(name, prefix+"_")))
		}
	}
	slices.Sort(known)
	return 0, session.Usagef("--%s %q: want one of %s", flag, given, strings.Join(known, ", "))
}

// sourceURL returns source if it is a URL or names a snapshot. Otherwise source is a path, and sourceURL returns it as
// an absolute file:// URL.
func sourceURL(source string) (string, error) {
	if strings.Contains(source, "://") || strings.HasPrefix(source, snapshotScheme) {
		return source, nil
	}
	path, err := filepath.Abs(source)
	if err != nil {
		return "", fmt.Errorf("make %s absolute: %w", source, err)
	}
	return (&url.URL{Scheme: "file", Path: path}).String(), nil
}

// run creates the image and, without --no-wait, waits until its import has succeeded or failed.
func (f *importFlags) run(ctx context.Context, s *session.Session, client vmv1.ImageServiceClient, req *vmv1.CreateImageRequest) (image *vmv1.Image, err error) {
	goesOn := session.Ongoing{What: "the import goes on", Look: "trivet image show " + req.GetName()}
	err = s.WaitOngoing("importing "+req.GetName(), goesOn, func(say func(string)) error {
		image, err = client.CreateImage(ctx, req)
		for pause := firstPoll; err == nil && f.wait.On() && !settled(image); pause = min(2*pause, lastPoll) {
			say(fmt.Sprintf("importing %s: %s, %s", req.GetName(), show.Enum("IMAGE_STATUS", image.GetStatus()), show.Bytes(image.GetSizeBytes())))
			if err = dial.Sleep(ctx, pause); err != nil {
				return fmt.Errorf("image %s (%s) is still %s: %w", image.GetName(), image.GetId(), show.Enum("IMAGE_STATUS", image.GetStatus()), err)
			}
			image, err = client.GetImage(ctx, &vmv1.GetImageRequest{OrgId: req.GetOrgId(), ImageId: image.GetId()})
		}
		return err
	})
	if err == nil {
		err = failure(image, "imported")
	}
	return image, err
}

func settled(i *vmv1.Image) bool {
	return i.GetStatus() == vmv1.ImageStatus_IMAGE_STATUS_AVAILABLE || i.GetStatus() == vmv1.ImageStatus_IMAGE_STATUS_ERROR
}
