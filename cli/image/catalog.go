package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/images"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// listTime is the maximum time for reading a publisher's list of checksums.
	listTime = 30 * time.Second
	// maxList is the maximum size of a publisher's list of checksums, in bytes.
	maxList = 4 << 20
)

// entry is one image in the catalog, as its publisher distributes it.
type entry struct {
	Name         string `yaml:"name" json:"name"`
	Architecture string `yaml:"architecture" json:"architecture"`
	OS           string `yaml:"os" json:"os"`
	URL          string `yaml:"url" json:"url"`
	Checksums    string `yaml:"checksums" json:"checksums"`
}

// parseCatalog parses a catalog. It returns an error if an entry lacks a field or has a URL that is not https, or if
// two entries have the same name.
func parseCatalog(text []byte) ([]entry, error) {
	var c struct {
		Images []entry `yaml:"images"`
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil {
		return nil, fmt.Errorf("parse the catalog: %w", err)
	}
	names := map[string]bool{}
	for _, e := range c.Images {
		if err := cloud.CheckName("name", e.Name); err != nil {
			return nil, fmt.Errorf("parse the catalog: %w", err)
		}
		if names[e.Name] {
			return nil, fmt.Errorf("parse the catalog: %s is listed twice", e.Name)
		}
		names[e.Name] = true
		for _, text := range []string{e.URL, e.Checksums} {
			if u, err := url.Parse(text); err != nil || u.Scheme != "https" || u.Host == "" {
				return nil, fmt.Errorf("parse the catalog: %s: %q is not an https URL", e.Name, text)
			}
		}
	}
	return c.Images, nil
}

func catalogCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "catalog", Short: "List and import images of Linux distributions", Args: cobra.NoArgs, RunE: printHelp,
	}
	var file string
	c.PersistentFlags().StringVar(&file, "catalog", "", "read the catalog from this YAML file (default: the built-in one)")
	read := func() ([]entry, error) {
		text := images.Catalog
		if file != "" {
			var err error
			if text, err = os.ReadFile(file); err != nil {
				return nil, fmt.Errorf("read the catalog: %w", err)
			}
		}
		return parseCatalog(text)
	}
	c.AddCommand(catalogListCommand(s, read), catalogImportCommand(s, read))
	return c
}

func catalogListCommand(s *session.Session, read func() ([]entry, error)) *cobra.Command {
	entries := &list.Kind[entry]{
		Page: func(_ context.Context, _ *dial.Conn, q list.Query) ([]entry, string, error) {
			all, err := read()
			if err != nil {
				return nil, "", err
			}
			return list.Slice(all, q)
		},
		Name: func(e entry) string { return e.Name },
		Columns: func(context.Context, *session.Session, *dial.Conn) []list.Column[entry] {
			return []list.Column[entry]{
				{Name: "NAME", Text: func(e entry) string { return e.Name }},
				{Name: "SYSTEM", Text: func(e entry) string { return e.OS }},
				{Name: "ARCHITECTURE", Text: func(e entry) string { return e.Architecture }},
				{Name: "PUBLISHER", Text: publisherHost},
				{Name: "URL", Text: func(e entry) string { return e.URL }, In: list.InWide},
			}
		},
	}
	return entries.LocalCommand(s, &cobra.Command{Use: "list", Short: "List the images that can be imported"})
}

// publisherHost returns the host of the URL of an image.
func publisherHost(e entry) string {
	u, err := url.Parse(e.URL)
	if err != nil {
		return ""
	}
	return u.Host
}

func catalogImportCommand(s *session.Session, read func() ([]entry, error)) *cobra.Command {
	var f importFlags
	var as string
	c := &cobra.Command{
		Use:   "import NAME",
		Short: "Import an image of the catalog",
		Long: `Import an image of the catalog. This command reads the publisher's list of checksums, and the control plane fetches the
image. An image with another checksum is refused.`,
		Example: "  trivet image catalog import debian-12 --public",
		Args:    session.Exactly("NAME"),
	}
	p := c.Flags()
	p.StringVar(&as, "as", "", "name of the image (default: the name in the catalog)")
	p.BoolVar(&f.public, "public", false, "share it with every org (requires system:admin)")
	p.StringSliceVar(&f.sharedWith, "shared-with", nil, "share it with these orgs: ORG,...")
	f.wait.Add(c, true)
	c.RunE = s.Run(importTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		e, err := findEntry(read, args[0])
		if err != nil {
			return err
		}
		f.os, f.arch, f.format = e.OS, e.Architecture, "qcow2"
		if as == "" {
			as = e.Name
		}
		req, err := f.request(as, e.URL)
		if err != nil {
			return err
		}
		key, sum, err := e.checksum(ctx, s.HTTP)
		if err != nil {
			return err
		}
		if req.Metadata == nil {
			req.Metadata = map[string]string{}
		}
		req.Metadata[key] = sum
		req.OrgId, _ = s.Tenant()
		image, err := f.run(ctx, s, vmv1.NewImageServiceClient(conn), req)
		if err != nil {
			return err
		}
		return printImage(ctx, s, image)
	})
	return c
}

func findEntry(read func() ([]entry, error), name string) (entry, error) {
	all, err := read()
	if err != nil {
		return entry{}, err
	}
	for _, e := range all {
		if e.Name == name {
			return e, nil
		}
	}
	return entry{}, session.Errorf(codes.NotFound, "`trivet image catalog list` shows all", "the catalog has no image %q", name)
}

// checksum reads the publisher's list of checksums. It returns the checksum of the entry's image, and the image
// metadata key that makes the control plane verify this checksum. If client is nil, checksum uses http.DefaultClient.
func (e *entry) checksum(ctx context.Context, client *http.Client) (key, sum string, err error) {
	if client == nil {
		client = http.DefaultClient
	}
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, e.Checksums, nil)
	if err != nil {
		return "", "", fmt.Errorf("read the checksums of %s: %w", e.Name, err)
	}
	resp, err := client.Do(r)
	if err != nil {
		return "", "", fmt.Errorf("read the checksums of %s: %w", e.Name, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", "", fmt.Errorf("read the checksums of %s: %s answered %s", e.Name, e.Checksums, resp.Status)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxList+1))
	if err != nil {
		return "", "", fmt.Errorf("read the checksums of %s: %w", e.Name, err)
	}
	if len(text) > maxList {
		return "", "", fmt.Errorf("read the checksums of %s: the list is longer than %s", e.Name, show.Bytes(maxList))
	}
	key, sum = findChecksum(string(text), path.Base(e.URL))
	if sum == "" {
		return "", "", errors.New("the list " + e.Checksums + " has no checksum of " + path.Base(e.URL))
	}
	return key, sum, nil
}

var (
	// plainLine matches a line in the output format of sha256sum and sha512sum: hash, space, space or asterisk, file
	// name.
	plainLine = regexp.MustCompile(`^([0-9a-fA-F]+) [ *](\S+)$`)
	// bsdLine matches a line in the BSD format: SHA256 (FILE) = HASH.
	bsdLine = regexp.MustCompile(`^(SHA256|SHA512) \((\S+)\) = ([0-9a-fA-F]+)$`)
)

// findChecksum returns the checksum of a file in a publisher's list, and the metadata key for its algorithm. It returns
// "" if the list has no checksum of the file.
func findChecksum(list, file string) (key, sum string) {
	for line := range strings.Lines(list) {
		line = strings.TrimSpace(line)
		if m := bsdLine.FindStringSubmatch(line); m != nil {
			line = m[3] + "  " + m[2]
		}
		m := plainLine.FindStringSubmatch(line)
		if m == nil || strings.TrimPrefix(m[2], "./") != file {
			continue
		}
		switch len(m[1]) {
		case 64:
			return cloud.SourceSHA256, strings.ToLower(m[1])
		case 128:
			return cloud.SourceSHA512, strings.ToLower(m[1])
		}
	}
	return "", ""
}
