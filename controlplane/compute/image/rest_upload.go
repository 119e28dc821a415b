package image

import (
	"net/http"

	"github.com/gorilla/mux"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// maxPartBodies is the maximum number of parts that a member receives by REST at a time, and maxPartBodiesOf is the
// maximum for one org. Further parts are refused, because each body is held in memory.
const (
	maxPartBodies   = 16
	maxPartBodiesOf = maxPartBodies / 2
)

func (s *Service) postUpload(w *rest.Response, r *http.Request) (any, error) {
	i, hash, err := readDescription(r, "BeginImageUpload")
	if err != nil {
		return nil, err
	}
	if i.Source != "" {
		return nil, fault.Invalid("source_url", "an upload has no source: use POST /api/v1/images")
	}
	out, err := s.BeginUpload(r.Context(), i, hash)
	if err != nil {
		return nil, err
	}
	created(w, out.Replayed)
	return struct {
		Image   map[string]any `json:"image"`
		Session string         `json:"upload_session_id"`
		MinPart uint32         `json:"minimum_part_size_bytes"`
	}{toREST(&out.Image, i.Org), out.Image.Upload.ID, MinPartBytes}, nil
}

// admitImage authorizes a call about the upload of the image in the path.
func (s *Service) admitImage(r *http.Request, method auth.Method) (UploadRef, error) {
	t, err := auth.Admit(r.Context(), method, r.URL.Query().Get("org_id"), "")
	if err != nil {
		return UploadRef{}, err
	}
	return s.findUpload(r.Context(), UploadRef{Org: t.Org, Image: idOf(r)})
}

// admitSession authorizes a call about the upload session in the path.
func (s *Service) admitSession(r *http.Request, method auth.Method) (UploadRef, error) {
	org, err := admitQuery(r, method)
	if err != nil {
		return UploadRef{}, err
	}
	return s.findUpload(r.Context(), UploadRef{Org: org, Session: mux.Vars(r)["session"]})
}

type partResponse struct {
	// The number of the part.
	Number uint32 `json:"part_number"`
	// The number of bytes of the part.
	Size uint64 `json:"size_bytes"`
	// The SHA-256 of the part, in hexadecimal digits.
	SHA256 string `json:"sha256"`
}

type partsResponse struct {
	// The upload session.
	Session string `json:"upload_session_id"`
	// The parts that are stored, in the order of their numbers.
	Parts []partResponse `json:"parts"`
	// True if there are further parts.
	More bool `json:"more"`
}

type storedPartResponse struct {
	// The number of the part.
	Number uint32 `json:"part_number"`
	// The number of bytes of the part that are stored.
	Committed uint64 `json:"committed_size_bytes"`
}

func (s *Service) getParts(_ *rest.Response, r *http.Request) (any, error) {
	u, err := s.admitImage(r, dataService+"ListUploadedParts")
	if err != nil {
		return nil, err
	}
	after, err := numberOf("after", r.URL.Query().Get("after"))
	if err != nil {
		return nil, err
	}
	list, more, err := s.Parts(r.Context(), u, after, maxPartsPage)
	if err != nil {
		return nil, err
	}
	out := partsResponse{u.Session, []partResponse{}, more}
	for _, p := range list {
		out.Parts = append(out.Parts, partResponse{p.Number, p.Size, p.SHA256})
	}
	return out, nil
}

func (s *Service) putPart(_ *rest.Response, r *http.Request) (any, error) {
	u, err := s.admitImage(r, service+"UploadImagePart")
	if err != nil {
		return nil, err
	}
	n, err := numberOf("part_number", mux.Vars(r)["n"])
	if err != nil {
		return nil, err
	}
	if !s.partBodiesOf.take(u.Org) {
		return nil, fault.New(fault.Throttled, "this member is already receiving %d parts of org %s: try again later", maxPartBodiesOf, u.Org).
			MayRetry()
	}
	defer s.partBodiesOf.give(u.Org)
	select {
	case s.partBodies <- struct{}{}:
		defer func() { <-s.partBodies }()
	default:
		return nil, fault.New(fault.Throttled, "this member receives %d parts already", maxPartBodies).MayRetry()
	}
	body, err := rest.ReadBody(r)
	if err != nil {
		return nil, err
	}
	size, err := s.UploadPart(r.Context(), u, n, body)
	if err != nil {
		return nil, err
	}
	return storedPartResponse{n, size}, nil
}

func (s *Service) completeUpload(_ *rest.Response, r *http.Request) (any, error) {
	u, err := s.admitSession(r, "CompleteImageUpload")
	if err != nil {
		return nil, err
	}
	i, err := s.CompleteUpload(r.Context(), u)
	if err != nil {
		return nil, err
	}
	return toREST(i, u.Org), nil
}

func (s *Service) deleteUpload(_ *rest.Response, r *http.Request) (any, error) {
	org, err := admitQuery(r, "AbortImageUpload")
	if err != nil {
		return nil, err
	}
	image, err := s.AbortUpload(r.Context(), UploadRef{Org: org, Session: mux.Vars(r)["session"]}, pathHash(r))
	if err != nil {
		return nil, err
	}
	return rest.Deleted{ID: string(image), Deleted: true}, nil
}
