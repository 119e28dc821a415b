package image

import (
	"context"
	"crypto/sha256"
	"net/http"
	"strconv"
	"strings"

	"github.com/gorilla/mux"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Routes registers the image endpoints of the REST API (docs/api.md).
func (s *Service) Routes(r *rest.Server) {
	const all, one, uploads = "/api/v1/images", "/api/v1/images/{id}", "/api/v1/images/uploads"
	var (
		org     = rest.QueryOf("org_id", nil, "The org of the image. Empty: the org of the call.")
		data    = protorest.Output{Message: (&vmv1.Image{}).ProtoReflect().Descriptor()}
		image   = rest.Returns(http.StatusOK, data)
		created = rest.Returns(http.StatusCreated, data)
		deleted = rest.Returns(http.StatusOK, rest.Deleted{})
	)
	r.Handle(http.MethodGet, all, service+"ListImages", s.getImages, org, rest.Query("page_token"), rest.QueryOf("include_public", false, "List public images of other orgs too."),
		rest.Returns(http.StatusOK, protorest.Output{Message: (&vmv1.ListImagesResponse{}).ProtoReflect().Descriptor()}))
	r.Handle(http.MethodPost, all, service+"CreateImage", s.postImage, rest.Takes(describeBody{}), created)
	r.Handle(http.MethodPost, uploads, service+"BeginImageUpload", s.postUpload, rest.Takes(describeBody{}),
		rest.Returns(http.StatusCreated, protorest.Output{Message: (&vmv1.BeginImageUploadResponse{}).ProtoReflect().Descriptor()}))
	r.Handle(http.MethodPost, uploads+"/{session}/complete", service+"CompleteImageUpload", s.completeUpload, org, image)
	r.Handle(http.MethodDelete, uploads+"/{session}", service+"AbortImageUpload", s.deleteUpload, org, deleted)
	r.Handle(http.MethodGet, one+"/parts", dataService+"ListUploadedParts", s.getParts, org, rest.QueryOf("after", uint32(0), "List the parts after this one."),
		rest.Returns(http.StatusOK, partsResponse{}))
	r.HandleBody(http.MethodPut, one+"/parts/{n}", service+"UploadImagePart", maxPartBytes, s.putPart, org, rest.TakesBinary("application/octet-stream"),
		rest.Returns(http.StatusOK, storedPartResponse{}))
	r.Handle(http.MethodGet, one, service+"GetImage", s.getImage, org, image)
	r.Handle(http.MethodPatch, one, service+"UpdateImage", s.patchImage, rest.Takes(updateBody{}), image)
	r.Handle(http.MethodDelete, one, service+"DeleteImage", s.deleteImage, org, deleted)
	protorest.Serve(r, &storagev1.ImageDataService_ServiceDesc, &dataServer{s: s}, []protorest.Row{
		{Method: http.MethodGet, Path: "/api/v1/all-images", RPC: "ListAllImages"},
		{Method: http.MethodGet, Path: "/api/v1/images/{image_id}/data", RPC: "DownloadImage", Media: "application/octet-stream"},
	})
	r.ResolveNames("images", func(ctx context.Context, t cloud.Tenant, name string) (string, error) {
		org, err := admit(ctx, "GetImage", string(t.Org))
		if err != nil {
			return "", err
		}
		return s.named(ctx, org, name)
	})
}

// toREST returns an image as a JSON object: the encoding of vmcontroller.v1.Image by package protorest.
func toREST(i *cloud.Image, org cloud.OrgID) map[string]any {
	return protorest.Encode(toProto(i, org).ProtoReflect())
}

// describeBody is the JSON body that describes a new image.
type describeBody struct {
	// 1 to 63 of a-z 0-9 -, starting with a letter. No other image of the org can have the name, except images in the
	// status ERROR.
	Name *string `json:"name" api:"required"`
	// The org of the image. Empty: that of the call.
	OrgID string `json:"org_id"`
	// private, shared or public. Empty: private.
	Visibility string `json:"visibility"`
	// raw, qcow2, vmdk or vhd. Empty: it is detected. If the bytes have another format, the image goes to ERROR.
	Format string `json:"format"`
	// linux, windows or bsd.
	OSType string `json:"os_type"`
	// At most 128 printable bytes.
	OSVersion string `json:"os_version"`
	// x86_64 or aarch64.
	Architecture string `json:"architecture"`
	// The smallest disk of a VM, at most 65536 GiB.
	MinDiskGiB uint32 `json:"min_disk_gib"`
	// The smallest memory of a VM, at most 12582912 MiB.
	MinMemoryMiB uint32 `json:"min_memory_mib"`
	// Pairs for callers.
	Metadata map[string]string `json:"metadata"`
	// A file:///path in an import directory of the member, an https:// URL of at most 64 GiB, or snapshot:ID. At most
	// 4096 bytes.
	SourceURL string `json:"source_url"`
}

// enumOf returns the number of the enumeration value with the given lower-case name, and 0 for an empty name.
func enumOf(field, name, prefix string, values map[string]int32) (int32, error) {
	if name == "" {
		return 0, nil
	}
	n, ok := values[prefix+"_"+strings.ToUpper(name)]
	if !ok || n == 0 || name != strings.ToLower(name) {
		return 0, fault.Invalid(field, "unknown value %q", truncate(name))
	}
	return n, nil
}

// image returns the image that the body describes.
func (b *describeBody) image() (cloud.Image, error) {
	if b.Name == nil {
		return cloud.Image{}, fault.Invalid("name", "is required")
	}
	in := &vmv1.CreateImageRequest{
		Name: *b.Name, OsVersion: b.OSVersion, MinDiskGib: b.MinDiskGiB, MinMemoryMib: b.MinMemoryMiB, Metadata: b.Metadata, SourceUrl: b.SourceURL,
	}
	for _, e := range []struct {
		field, name, prefix string
		values              map[string]int32
		set                 func(int32)
	}{
		{"visibility", b.Visibility, "VISIBILITY", vmv1.Visibility_value, func(n int32) { in.Visibility = vmv1.Visibility(n) }},
		{"format", b.Format, "IMAGE_FORMAT", vmv1.ImageFormat_value, func(n int32) { in.Format = vmv1.ImageFormat(n) }},
		{"os_type", b.OSType, "OS_TYPE", vmv1.OsType_value, func(n int32) { in.OsType = vmv1.OsType(n) }},
		{"architecture", b.Architecture, "ARCHITECTURE", vmv1.Architecture_value, func(n int32) { in.Architecture = vmv1.Architecture(n) }},
	} {
		n, err := enumOf(e.field, e.name, e.prefix, e.values)
		if err != nil {
			return cloud.Image{}, err
		}
		e.set(n)
	}
	return convert.ImageFrom(in), nil
}

// readDescription authorizes a call that creates an image. It returns the image that the call's body describes and the
// body's hash.
func readDescription(r *http.Request, method auth.Method) (i cloud.Image, hash [32]byte, err error) {
	// The caller is authenticated before the body is read. The authorization follows afterwards, because the org is in
	// the body.
	if _, err := admit(r.Context(), method, ""); err != nil && !auth.Undecided(err) {
		return i, hash, err
	}
	var in describeBody
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return i, hash, err
	}
	org, err := admit(r.Context(), method, in.OrgID)
	if err != nil {
		return i, hash, err
	}
	if i, err = in.image(); err != nil {
		return i, hash, err
	}
	i.Org = org
	return i, sha256.Sum256(raw), nil
}

func created(w *rest.Response, replayed bool) {
	w.Status = http.StatusCreated
	if replayed {
		w.Header().Set("Idempotency-Replayed", "true")
	}
}

func (s *Service) postImage(w *rest.Response, r *http.Request) (any, error) {
	i, hash, err := readDescription(r, "CreateImage")
	if err != nil {
		return nil, err
	}
	out, err := s.Create(r.Context(), i, hash)
	if err != nil {
		return nil, err
	}
	created(w, out.Replayed)
	return toREST(&out.Image, i.Org), nil
}

func (s *Service) getImages(_ *rest.Response, r *http.Request) (any, error) {
	q := r.URL.Query()
	org, err := admit(r.Context(), "ListImages", q.Get("org_id"))
	if err != nil {
		return nil, err
	}
	public, err := boolOf("include_public", q.Get("include_public"))
	if err != nil {
		return nil, err
	}
	list, next, err := s.List(r.Context(), org, public, cloud.DefaultPage, q.Get("page_token"))
	if err != nil {
		return nil, err
	}
	out := struct {
		Images []map[string]any `json:"images"`
		Next   string           `json:"next_page_token,omitempty"`
	}{Images: []map[string]any{}, Next: next}
	for _, i := range list {
		out.Images = append(out.Images, toREST(i, org))
	}
	return out, nil
}

// boolOf returns the value of a query parameter that is "true", "false" or absent.
func boolOf(name, value string) (bool, error) {
	switch value {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, fault.Invalid(name, "must be true or false")
}

func idOf(r *http.Request) cloud.ImageID { return cloud.ImageID(mux.Vars(r)["id"]) }

// admitQuery authorizes a call that may name its org in the query.
func admitQuery(r *http.Request, method auth.Method) (cloud.OrgID, error) {
	return admit(r.Context(), method, r.URL.Query().Get("org_id"))
}

func (s *Service) getImage(_ *rest.Response, r *http.Request) (any, error) {
	org, err := admitQuery(r, "GetImage")
	if err != nil {
		return nil, err
	}
	i, err := s.Get(r.Context(), org, idOf(r))
	if err != nil {
		return nil, err
	}
	return toREST(i, org), nil
}

// updateBody is the JSON body of a change of an image.
type updateBody struct {
	// The org of the image. Empty: that of the call.
	OrgID string `json:"org_id"`
	// The new name. Empty: unchanged.
	Name string `json:"name"`
	// private, shared or public. Empty: unchanged.
	Visibility string `json:"visibility"`
	// Pairs to add or to change. An empty value removes the pair.
	Metadata map[string]string `json:"metadata"`
}

func (s *Service) patchImage(_ *rest.Response, r *http.Request) (any, error) {
	if _, err := admit(r.Context(), "UpdateImage", ""); err != nil && !auth.Undecided(err) {
		return nil, err
	}
	var in updateBody
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	org, err := admit(r.Context(), "UpdateImage", in.OrgID)
	if err != nil {
		return nil, err
	}
	v, err := enumOf("visibility", in.Visibility, "VISIBILITY", vmv1.Visibility_value)
	if err != nil {
		return nil, err
	}
	i, err := s.Update(r.Context(), org, idOf(r), in.Name, convert.Visibility(vmv1.Visibility(v)), in.Metadata)
	if err != nil {
		return nil, err
	}
	return toREST(&i, org), nil
}

// pathHash returns the SHA-256 of the method and the path. It is the hash of the request, stored with the idempotency
// key, of a call without a body.
func pathHash(r *http.Request) [32]byte { return sha256.Sum256([]byte(r.Method + " " + r.URL.Path)) }

func (s *Service) deleteImage(_ *rest.Response, r *http.Request) (any, error) {
	org, err := admitQuery(r, "DeleteImage")
	if err != nil {
		return nil, err
	}
	if err := s.Delete(r.Context(), org, idOf(r), pathHash(r)); err != nil {
		return nil, err
	}
	return rest.Deleted{ID: string(idOf(r)), Deleted: true}, nil
}

// numberOf returns a decimal number from a path or a query. It returns 0 for an empty text.
func numberOf(name, text string) (uint32, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, fault.Invalid(name, "must be a whole number")
	}
	return uint32(n), nil
}
