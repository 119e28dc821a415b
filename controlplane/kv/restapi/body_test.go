package restapi

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sendUnfinished starts a chunked PUT, sends bytes of its body, and does not end the body. If there is a response, its
// status, Retry-After header and body are sent to refused.
func (s *testCluster) sendUnfinished(bytes int, refused chan<- string) net.Conn {
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(s.port))))
	require.NoError(s.t, err)
	_, err = fmt.Fprintf(conn, "PUT /api/v1/kv/slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
	require.NoError(s.t, err)
	var work sync.WaitGroup
	work.Go(func() { // the member may refuse the request before it has read all of it
		fmt.Fprintf(conn, "%x\r\n%s\r\n", bytes, `{"value":"`+strings.Repeat("x", max(bytes-10, 0)))
	})
	work.Go(func() {
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return
		}
		body, _ := io.ReadAll(resp.Body)
		refused <- fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("Retry-After"), " ", string(body))
	})
	s.t.Cleanup(func() { conn.Close(); work.Wait() })
	return conn
}

// chargedBytes returns how many bytes of unfinished request bodies count against each tier.
func (s *testCluster) chargedBytes() (out []int64) {
	for i, t := range bodyTiers {
		free := t.room
		for free > 0 && !s.rest[1].bodies[i].TryAcquire(free) {
			free -= 1 << 10
		}
		s.rest[1].bodies[i].Release(free)
		out = append(out, t.room-free)
	}
	return out
}

func (s *testCluster) put(bytes int) response { return s.putText(strings.Repeat("v", bytes)) }

// putText puts a value. text is the encoding of the value as a JSON string, without the quotes.
func (s *testCluster) putText(text string) response {
	body := `{"value":"` + text + `"}`
	return s.send(1, fmt.Sprintf("PUT /api/v1/kv/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body))
}

// TestUnfinishedBodiesAreBounded checks that an unfinished request body counts against the budget only with the bytes
// that arrived. When unfinished bodies use the whole budget for large bodies, small requests must still be served, and
// a further large body must be refused.
func TestUnfinishedBodiesAreBounded(t *testing.T) {
	s := newTestCluster(t, 1, false, true)
	silent := make(chan string, 50)
	for range 50 {
		s.sendUnfinished(10, silent)
	}
	for _, text := range []string{"v", strings.Repeat(`\u0076`, 1_500_000)} {
		a := s.putText(text)
		require.Equal(t, 200, a.status, "%s", a.body)
	}
	require.Zero(t, s.chargedBytes()[1]+s.chargedBytes()[2], "only bytes that arrived are counted")

	const each, fit = 11 << 20, 7 // bytes of each body; the tier has room for 7 of them
	var slow []net.Conn
	answered := make(chan string, fit)
	for range fit {
		slow = append(slow, s.sendUnfinished(each, answered))
	}
	all := fit * (each - bodyTiers[1].upTo)
	require.Eventually(t, func() bool { return s.chargedBytes()[2] == all }, 20*time.Second, 10*time.Millisecond, "all bytes that arrived are counted")
	refused := make(chan string, 1)
	slow = append(slow, s.sendUnfinished(each, refused))
	select {
	case text := <-refused:
		require.True(t, strings.HasPrefix(text, "429 1 "), text)
		require.Contains(t, text, "too many large request bodies")
	case <-time.After(20 * time.Second):
		t.Fatal("eight bodies of 11 MiB were accepted at once")
	}
	require.GreaterOrEqual(t, s.chargedBytes()[2], all, "the other bodies are still counted")
	require.Empty(t, answered, "the other requests are still open")
	for _, size := range []int{1, 3000, 60_000} {
		a := s.put(size)
		require.Equal(t, 200, a.status, "%d bytes: %s", size, a.body)
	}
	for _, conn := range slow {
		conn.Close()
	}
	require.Eventually(t, func() bool { return s.chargedBytes()[2] == 0 }, 20*time.Second, 10*time.Millisecond)
	a := s.put(1 << 20)
	require.Equal(t, 200, a.status, "%s", a.body)
}
