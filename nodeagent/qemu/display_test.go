package qemu

import (
	"bytes"
	"image"
	"image/png"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDisplay takes pictures of the display of a guest that prints text with the firmware, and opens the display and the
// serial port. After a restart of the agent the display must work as before.
func TestDisplay(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	s.Display = true
	p := l.launch(s, files)
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")
	l.firmwareText(p)
	l.vnc(p)

	port, err := p.DialSerial(l.ctx)
	require.NoError(t, err)
	require.NoError(t, port.Close())
	p.Close()
	again, err := l.launcher.Adopt(l.ctx, l.home)
	require.NoError(t, err)
	t.Cleanup(again.Close)
	l.firmwareText(again)
	l.vnc(again)
}

// TestNoDisplay checks the error for a VM that an agent of an earlier version started.
func TestNoDisplay(t *testing.T) {
	p := newLab(t).boot()
	_, err := p.Screenshot(t.Context())
	require.ErrorIs(t, err, ErrNoDisplay)
	_, err = p.OpenVNC(t.Context())
	require.ErrorIs(t, err, ErrNoDisplay)
}

// firmwareText checks that the first line of the display begins with "SeaBIOS (version". It compares the cells of the text
// mode, which have 9x16 pixels, with one another, so that it needs no font: cells of equal letters are equal, and cells
// of different letters differ.
func (l *lab) firmwareText(p *Process) {
	l.Helper()
	file, err := p.Screenshot(l.ctx)
	require.NoError(l, err)
	picture, err := png.Decode(bytes.NewReader(file))
	require.NoError(l, err)
	require.Equal(l, image.Pt(720, 400), picture.Bounds().Size())
	const want = "SeaBIOS (version"
	shown := map[string]byte{}
	text := ""
	for column, letter := range []byte(want) {
		var cell strings.Builder
		for y := range 16 {
			for x := range 9 {
				if r, _, _, _ := picture.At(9*column+x, y).RGBA(); r > 0x8000 {
					cell.WriteByte('#')
				} else {
					cell.WriteByte('.')
				}
			}
		}
		if _, known := shown[cell.String()]; !known {
			shown[cell.String()] = letter
		}
		text += string(shown[cell.String()])
		require.Equal(l, letter == ' ', !strings.Contains(cell.String(), "#"), "column %d", column)
	}
	require.Equal(l, want, text)
}

// vnc does the handshake of RFB 3.8 and reads the size of the display.
func (l *lab) vnc(p *Process) {
	l.Helper()
	screen, err := p.OpenVNC(l.ctx)
	require.NoError(l, err)
	defer screen.Close()
	read := func(n int) []byte {
		data := make([]byte, n)
		_, err := io.ReadFull(screen, data)
		require.NoError(l, err)
		return data
	}
	write := func(text string) {
		_, err := io.WriteString(screen, text)
		require.NoError(l, err)
	}
	require.Equal(l, "RFB 003.008\n", string(read(12)))
	write("RFB 003.008\n")
	require.Equal(l, []byte{1, 1}, read(2), "the only security type must be None")
	write("\x01")
	require.Equal(l, []byte{0, 0, 0, 0}, read(4))
	write("\x01")
	require.Equal(l, []byte{0x02, 0xd0, 0x01, 0x90}, read(24)[:4], "the display must have 720x400 pixels")
}
