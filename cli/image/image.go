// Package image holds the commands for images: `trivet image`. Package vm uses its function Find for the images of a
// new VM.
//
// Image names need not be unique. If a name matches several images, the command returns an error that lists them.
package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// callTimeout is the deadline of commands that do not wait for an import, unless --timeout is given.
const callTimeout = 30 * time.Second

// Command returns the command `trivet image`.
func Command(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "image", Short: "Import, upload, download, list, update and delete images", Args: cobra.NoArgs, RunE: printHelp}
	c.AddCommand(importCommand(s), uploadCommand(s), downloadCommand(s), catalogCommand(s), listCommand(s), showCommand(s), updateCommand(s), deleteCommand(s))
	return c
}

func printHelp(c *cobra.Command, _ []string) error { return c.Help() }

func listCommand(s *session.Session) *cobra.Command {
	var own, everywhere bool
	k := listedIn(s, &own, &everywhere)
	page := k.Page
	k.Page = func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*vmv1.Image, string, error) {
		// For an org that does not exist, the list has the public images, so that it is not empty.
		if q.Token == "" && (s.Given("org") || s.Given("project")) {
			if err := s.CheckTenant(ctx, conn); err != nil {
				return nil, "", err
			}
		}
		return page(ctx, conn, q)
	}
	c := k.Command(s, &cobra.Command{Use: "list", Short: "List the images that you can use"}, callTimeout)
	c.Flags().BoolVar(&own, "own", false, "list only the images of the org")
	session.AllProjectsFlag(c, &everywhere)
	session.Exclusive(c, "own", "all-projects")
	return c
}

// listed describes images for lists: those of the org and, unless own is true, the public ones of other orgs.
func listed(s *session.Session, own *bool) *list.Kind[*vmv1.Image] {
	return listedIn(s, own, new(bool))
}

// listedIn is like listed. If everywhere is true, it describes the images of all orgs.
func listedIn(s *session.Session, own, everywhere *bool) *list.Kind[*vmv1.Image] {
	return &list.Kind[*vmv1.Image]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*vmv1.Image, string, error) {
			if *everywhere {
				req := &storagev1.ListAllImagesRequest{PageSize: q.Size, PageToken: q.Token}
				req.OrgId, req.ProjectId = s.Within()
				page, err := storagev1.NewImageDataServiceClient(conn).ListAllImages(ctx, req)
				return page.GetImages(), page.GetNextPageToken(), err
			}
			org, _ := s.Tenant()
			page, err := vmv1.NewImageServiceClient(conn).ListImages(ctx, &vmv1.ListImagesRequest{
				OrgId: org, IncludePublic: !*own, PageSize: q.Size, PageToken: q.Token,
			})
			return page.GetImages(), page.GetNextPageToken(), err
		},
		Name: (*vmv1.Image).GetName,
		Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*vmv1.Image] {
			type image = *vmv1.Image
			return []list.Column[image]{
				{Name: "NAME", Text: image.GetName},
				{Name: "ID", Text: image.GetId, In: list.InWide},
				{Name: "STATUS", Text: func(i image) string { return show.Enum("IMAGE_STATUS", i.GetStatus()) }},
				{Name: "FORMAT", Text: func(i image) string { return show.Enum("IMAGE_FORMAT", i.GetFormat()) }},
				list.Size("SIZE", image.GetSizeBytes),
				{Name: "VISIBILITY", Text: func(i image) string { return show.Enum("VISIBILITY", i.GetVisibility()) }},
				{Name: "ORG", Text: image.GetOrgId, Max: 12},
				list.Age("AGE", s.Now, image.GetCreatedAt),
				list.Time("CREATED", image.GetCreatedAt, list.InWide),
				{Name: "CHECKSUM", Text: image.GetChecksum, In: list.OnDemand},
			}
		},
	}
}

// NameOf returns a function that returns the name of an image by its ID, if the caller can use the image.
func NameOf(ctx context.Context, s *session.Session, conn *dial.Conn) func(id string) string {
	return session.NameOf(func() (map[string]string, error) {
		images, err := all(ctx, s, conn, true)
		names := map[string]string{}
		for _, i := range images {
			names[i.GetId()] = i.GetName()
		}
		return names, err
	})
}

func showCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "show IMAGE", Short: "Show an image", Args: session.Exactly("IMAGE")}
	c.ValidArgsFunction = session.FirstArg(Names(s))
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := findObject(ctx, s, conn, name, true, anyImage)
		if err != nil {
			return err
		}
		org, _ := s.Tenant()
		i, err := vmv1.NewImageServiceClient(conn).GetImage(ctx, &vmv1.GetImageRequest{OrgId: org, ImageId: id})
		if err != nil {
			return err
		}
		return s.Print(i, []string{i.GetName()}, func(w io.Writer) error { return show.Fields(w, fields(s.Now(), i)) })
	})
	return c
}

func updateCommand(s *session.Session) *cobra.Command {
	var name, visibility string
	var metadata, sharedWith []string
	c := &cobra.Command{
		Use: "update IMAGE", Short: "Change the name, the visibility and the metadata of an image", Args: session.Exactly("IMAGE"),
		Long: `Change an image of the org, in any status. Images have metadata instead of labels. Metadata that is not given stays. An
empty value removes a pair. VMs that use the image are not changed. The content of an image cannot be changed: import or
upload another image.`,
		Example: "  trivet image update debian --name debian-12\n  trivet image update golden --metadata build=2026-11 --metadata draft=\n" +
			"  trivet image update golden --shared-with red,blue",
	}
	c.ValidArgsFunction = session.FirstArg(Names(s))
	c.Flags().StringVar(&name, "name", "", "new name")
	c.Flags().StringVar(&visibility, "visibility", "", "private, or public: usable by all orgs, which only an operator may choose")
	c.Flags().StringArrayVar(&metadata, "metadata", nil, "KEY=VALUE, or KEY= to remove the pair, repeatable")
	c.Flags().StringSliceVar(&sharedWith, "shared-with", nil, "share it only with these orgs, which replace the present list: ORG,...")
	_ = c.RegisterFlagCompletionFunc("visibility", cobra.FixedCompletions([]string{"private", "public"}, cobra.ShellCompDirectiveNoFileComp)) // its only error is for an unknown flag
	session.RequireOne(c, "name", "visibility", "metadata", "shared-with")
	session.Exclusive(c, "visibility", "shared-with")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		req := &vmv1.UpdateImageRequest{Name: name}
		switch visibility {
		case "":
		case "private":
			req.Visibility = vmv1.Visibility_VISIBILITY_PRIVATE
		case "public":
			req.Visibility = vmv1.Visibility_VISIBILITY_PUBLIC
		default:
			return session.Usagef("--visibility %q: want private or public", visibility)
		}
		var err error
		if req.Metadata, err = session.Pairs("metadata", metadata); err != nil {
			return err
		}
		if len(sharedWith) > 0 {
			req.Visibility = vmv1.Visibility_VISIBILITY_SHARED
			req.Metadata = setPair(req.Metadata, cloud.SharedWith, strings.Join(sharedWith, ","))
		} else if visibility != "" && req.Metadata[cloud.SharedWith] == "" {
			req.Metadata = setPair(req.Metadata, cloud.SharedWith, "") // the orgs with which it was shared
		}
		if req.ImageId, err = findObject(ctx, s, conn, args[0], false, anyImage); err != nil {
			return explainForeign(ctx, s, conn, args[0], err)
		}
		req.OrgId, _ = s.Tenant()
		i, err := vmv1.NewImageServiceClient(conn).UpdateImage(ctx, req)
		if err != nil {
			return err
		}
		return s.Print(i, []string{i.GetName()}, func(w io.Writer) error { return show.Fields(w, fields(s.Now(), i)) })
	})
	return c
}

// setPair sets a pair of m, which may be nil, and returns m.
func setPair(m map[string]string, key, value string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	m[key] = value
	return m
}

func deleteCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "delete IMAGE", Short: "Delete an image that no VM uses", Args: session.Exactly("IMAGE")}
	c.ValidArgsFunction = session.FirstArg(Names(s))
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		// Only images of the caller's org are looked up: public images of other orgs cannot be deleted.
		id, err := findObject(ctx, s, conn, name, false, anyImage)
		if err != nil {
			return explainForeign(ctx, s, conn, name, err)
		}
		org, _ := s.Tenant()
		if _, err := vmv1.NewImageServiceClient(conn).DeleteImage(ctx, &vmv1.DeleteImageRequest{OrgId: org, ImageId: id}); err != nil {
			return err
		}
		return s.Done(name, "deleted")
	})
	return c
}

// explainForeign returns a PERMISSION_DENIED error that names the org of a public image, if that is why an image with a
// name was not found in the caller's org. Otherwise it returns err, the error of the look-up.
func explainForeign(ctx context.Context, s *session.Session, conn *dial.Conn, name string, err error) error {
	var problem *session.Problem
	if !errors.As(err, &problem) || problem.Code != codes.NotFound {
		return err
	}
	images, listErr := all(ctx, s, conn, true)
	i := slices.IndexFunc(images, func(i *vmv1.Image) bool { return i.GetName() == name })
	if listErr != nil || i < 0 {
		return err
	}
	return &session.Problem{Code: codes.PermissionDenied, Message: fmt.Sprintf("image %s belongs to org %s, and only that org can change or delete it", name, images[i].GetOrgId())}
}

// Find returns the ID of the image with a name or ID, for a new VM. If several images have the name, Find ignores those
// in the state ERROR, unless all are in that state. If more than one image remains, Find returns an error that lists
// the remaining ones.
func Find(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) (string, error) {
	return find(ctx, s, conn, nameOrID, true, usable)
}

func anyImage(*vmv1.Image) bool { return true }
func usable(i *vmv1.Image) bool { return i.GetStatus() != vmv1.ImageStatus_IMAGE_STATUS_ERROR }

// findObject is like find, for commands whose object is the image itself. An operator can name an image of any org by
// its ID.
func findObject(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string, public bool, prefer func(*vmv1.Image) bool) (string, error) {
	if session.IsID(nameOrID) {
		s.LookUpByID(func() (org, project string, err error) {
			own, everywhere := false, true
			all, err := listedIn(s, &own, &everywhere).All(ctx, conn)
			i, err := session.WithID("image", nameOrID, all, err)
			return i.GetOrgId(), "", err
		})
	}
	return find(ctx, s, conn, nameOrID, public, prefer)
}

// find implements Find. If public is false, it looks only for images of the org.
func find(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string, public bool, prefer func(*vmv1.Image) bool) (string, error) {
	if session.IsID(nameOrID) {
		return nameOrID, nil
	}
	if err := cloud.CheckName("image", nameOrID); err != nil {
		return "", session.Usagef("%q is not a valid name or ID of an image", nameOrID)
	}
	images, err := all(ctx, s, conn, public)
	if err != nil {
		return "", err
	}
	images = slices.DeleteFunc(images, func(i *vmv1.Image) bool { return i.GetName() != nameOrID })
	if slices.ContainsFunc(images, prefer) {
		images = slices.DeleteFunc(images, func(i *vmv1.Image) bool { return !prefer(i) })
	}
	matches := make([]session.Match, len(images))
	for n, i := range images {
		matches[n] = session.Match{ID: i.GetId(), About: fmt.Sprintf("%s of %s, %s, created %s",
			show.Enum("IMAGE_STATUS", i.GetStatus()), i.GetOrgId(),
			cmp.Or(show.Enum("VISIBILITY", i.GetVisibility()), "PRIVATE"), show.When(i.GetCreatedAt()))}
	}
	org, _ := s.Tenant()
	return session.One("image", org, nameOrID, matches)
}

// all returns the images of the org and, if public is true, the public ones of other orgs.
func all(ctx context.Context, s *session.Session, conn *dial.Conn, public bool) ([]*vmv1.Image, error) {
	own := !public
	return listed(s, &own).All(ctx, conn)
}

// Names returns a shell completion with the names of images.
func Names(s *session.Session) cobra.CompletionFunc { return listed(s, new(bool)).Names(s) }

// printImage prints one image in the form of `trivet image list`.
func printImage(ctx context.Context, s *session.Session, i *vmv1.Image) error {
	return listed(s, new(bool)).PrintOne(ctx, s, nil, i)
}

func fields(now time.Time, i *vmv1.Image) [][2]string {
	atLeast := func(n uint64, unit string) string {
		if n == 0 {
			return ""
		}
		return fmt.Sprintf("%d %s", n, unit)
	}
	f := [][2]string{
		{"Name", i.GetName()},
		{"ID", i.GetId()},
		{"Org", i.GetOrgId()},
		{"Status", show.Enum("IMAGE_STATUS", i.GetStatus())},
		{"Visibility", show.Enum("VISIBILITY", i.GetVisibility())},
		{"Format", show.Enum("IMAGE_FORMAT", i.GetFormat())},
		{"Size", show.Bytes(i.GetSizeBytes())},
		{"Checksum", i.GetChecksum()},
		{"System", strings.TrimSpace(show.Enum("OS_TYPE", i.GetOsType()) + " " + i.GetOsVersion())},
		{"Architecture", show.Enum("ARCHITECTURE", i.GetArchitecture())},
		{"Needs disk", atLeast(uint64(i.GetMinDiskGib()), "GiB")},
		{"Needs memory", atLeast(uint64(i.GetMinMemoryMib()), "MiB")},
		{"Created", show.When(i.GetCreatedAt()) + " (" + show.Age(now, i.GetCreatedAt()) + " ago)"},
	}
	for _, k := range slices.Sorted(maps.Keys(i.GetMetadata())) {
		f = append(f, [2]string{"Metadata " + k, i.GetMetadata()[k]})
	}
	return f
}
