package rest

import (
	"errors"
	"net/http"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
)

// DownloadHandler handles a request whose response is bytes that are sent as they come. It authorizes the call, and
// calls send for each piece until the context of r ends. An error that it returns before the first piece is sent like
// the error of a Handler. After the first piece the status has already been sent. An error then closes the connection,
// so that the client does not mistake the pieces for the complete response.
type DownloadHandler func(r *http.Request, send func([]byte) error) error

// download is the response of a DownloadHandler.
type download struct {
	media string
	run   func(send func([]byte) error) error
}

// HandleDownload adds a GET route, like Handle, whose response is bytes of the given media type. Callers need a valid
// token. A download has no time limit. It ends when the caller's token becomes invalid, or when the client reads nothing
// for chunkTime.
func (s *Server) HandleDownload(path string, as auth.Method, media string, h DownloadHandler, options ...Option) {
	route := newRoute(http.MethodGet, path, as, "", options)
	route.Content, route.Data = media, nil
	s.open(route, func(_ *Response, r *http.Request) (any, error) {
		opened, err := s.openStream(route, r)
		if err != nil {
			return nil, err
		}
		return download{media, func(send func([]byte) error) error {
			return opened(func(r *http.Request) error { return h(r, send) })
		}}, nil
	})
}

// sendDownload sends the response of a DownloadHandler. It returns whether a part of the response was sent, like answer.
func sendDownload(w http.ResponseWriter, r *http.Request, d download) (began bool, err error) {
	control := http.NewResponseController(w)
	out := &deadlineWriter{w: w, control: control, status: http.StatusOK, media: d.media}
	err = d.run(func(piece []byte) error {
		if r.Method == http.MethodHead {
			out.begin()
			return errHeadOnly
		}
		if _, err := out.Write(piece); err != nil {
			return err
		}
		if err := control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return err
		}
		return nil
	})
	if errors.Is(err, errHeadOnly) {
		err = nil
	}
	if err == nil {
		out.begin()
	}
	return out.began, err
}
