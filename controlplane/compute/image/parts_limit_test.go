package image

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestTooManyParts uploads parts while the other member does not respond. The member must refuse further parts instead
// of keeping all of them in memory, and one org must not use up the limit of the member.
func TestTooManyParts(t *testing.T) {
	w := newWorld(t, 2)
	s := w.member(1)
	u := begin(t, s, described(""))
	s.opts.Peers = stallingPeers{s.opts.Peers}
	ctx, cancel := context.WithCancel(member(t))
	var calls sync.WaitGroup
	for n := range maxOpenPartsOf {
		calls.Go(func() { s.UploadPart(ctx, u, uint32(n+1), noise(1000)) })
	}
	t.Cleanup(func() { cancel(); calls.Wait() })
	require.Eventually(t, func() bool { return len(s.openPartCalls) == maxOpenPartsOf }, 30*time.Second, time.Millisecond)
	_, err := s.UploadPart(ctx, u, maxOpenPartsOf+1, noise(1000))
	require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
	require.ErrorContains(t, err, "parts of org acme: try again later")

	for n := range maxOpenParts - maxOpenPartsOf {
		_, err := s.enterUpload(cloud.OrgID("other" + string(rune('a'+n))))
		require.NoError(t, err)
	}
	_, err = s.enterUpload("last")
	require.ErrorContains(t, err, "receives 32 parts already")

	cancel()
	calls.Wait()
	leave, err := s.enterUpload("acme")
	require.NoError(t, err, "the ended calls do not count")
	leave()
}

// stallingPeers is a Peers whose calls of StorePart last until their context ends.
type stallingPeers struct{ Peers }

func (stallingPeers) StorePart(ctx context.Context, _ uint64, _ string, _ []byte) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestTooManyPartBodies begins to send parts by REST and does not end them. The member must refuse further parts of
// this org before it reads them.
func TestTooManyPartBodies(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	handler := w.rest(s)
	u := begin(t, s, described(""))
	put := func(body io.Reader) *httptest.ResponseRecorder {
		q := httptest.NewRequest(http.MethodPut, "http://127.0.0.1:8084/api/v1/images/"+string(u.Image)+"/parts/1", body)
		q.Header.Set("Authorization", "Bearer ada")
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		return a
	}
	var calls sync.WaitGroup
	var unfinished []*io.PipeWriter
	for range maxPartBodiesOf {
		body, writer := io.Pipe()
		unfinished = append(unfinished, writer)
		calls.Go(func() { put(body) })
	}
	t.Cleanup(func() {
		for _, w := range unfinished {
			w.CloseWithError(io.ErrUnexpectedEOF)
		}
		calls.Wait()
	})
	require.Eventually(t, func() bool { return len(s.partBodies) == maxPartBodiesOf }, 30*time.Second, time.Millisecond)
	refused := put(strings.NewReader("abc"))
	require.Equal(t, http.StatusTooManyRequests, refused.Code, refused.Body)
	require.Contains(t, refused.Body.String(), "8 parts of org acme: try again later")
}
