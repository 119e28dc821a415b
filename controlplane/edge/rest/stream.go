package rest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Stream is a function that writes the value of `data` piece by piece, as one JSON value. If the function fails after a
// part was sent, the connection is closed, so that the client does not mistake that part for the complete response.
type Stream func(w io.Writer) error

// Verbatim is the complete response of another member, including the envelope. It is forwarded unchanged while it is
// received; if it ends early, the connection is closed. Its HTTP status must be in Response.Status.
type Verbatim struct{ Body io.ReadCloser }

// Upgrade is a function that takes over the connection of a request, for a websocket. It returns began false and an error
// if it has written nothing; the client then gets a normal error response.
type Upgrade func(w http.ResponseWriter) (began bool, err error)

// chunkTime is the time that a client has to read one piece of a stream before the connection fails.
const chunkTime = 30 * time.Second

// chunkBytes is how many bytes of a stream are buffered before the first are sent. If the stream fails before that, the
// client gets a normal error response.
const chunkBytes = 64 << 10

// deadlineWriter sends the HTTP header before the first write, and before each write sets the connection's write
// deadline to chunkTime from now.
type deadlineWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	status  int
	media   string
	began   bool
}

func (p *deadlineWriter) Write(b []byte) (int, error) {
	// The response writers that tests use do not support deadlines, so the error is ignored.
	_ = p.control.SetWriteDeadline(time.Now().Add(chunkTime))
	p.begin()
	return p.w.Write(b)
}

func (p *deadlineWriter) begin() {
	if !p.began {
		p.began = true
		begin(p.w, p.status, p.media)
	}
}

// writePieces sends a response. It calls the parameter body to write the content, except for HEAD requests, which get
// only the header. It reports whether anything was sent.
func writePieces(w http.ResponseWriter, r *http.Request, status int, body func(io.Writer) error) (bool, error) {
	if r.Method == http.MethodHead {
		begin(w, status, jsonMedia)
		return true, nil
	}
	p := &deadlineWriter{w: w, control: http.NewResponseController(w), status: status, media: jsonMedia}
	out := bufio.NewWriterSize(p, chunkBytes)
	err := body(out)
	if err == nil {
		err = out.Flush()
	}
	return p.began, err
}

func stream(w http.ResponseWriter, r *http.Request, status int, data Stream, id string) (bool, error) {
	return writePieces(w, r, status, func(out io.Writer) error {
		meta, err := json.Marshal(metaOf(id))
		if err != nil {
			return err
		}
		if _, err := io.WriteString(out, `{"data":`); err != nil {
			return err
		}
		if err := data(out); err != nil {
			return err
		}
		_, err = fmt.Fprintf(out, ",\"meta\":%s}\n", meta)
		return err
	})
}

func verbatim(w http.ResponseWriter, r *http.Request, status int, data Verbatim) (bool, error) {
	defer data.Body.Close()
	return writePieces(w, r, status, func(out io.Writer) error {
		_, err := io.Copy(out, data.Body)
		return err
	})
}
