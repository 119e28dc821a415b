package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// bootScreen is the text that isolinux shows when a VM boots from the image of installerISO. After "boot: ", isolinux
// shows a blinking cursor and waits for a key.
const bootScreen = `Trivet installer, used by the tests.

The quick brown fox jumps over the lazy dog.
SPHINX OF BLACK QUARTZ, JUDGE MY VOW!
0123456789 +-*/=<> ()[]{} "':;.,?@#$%&|~

Press Enter to write the system to the first disk.

boot: `

// screenFile is a picture of bootScreen, 720x400 pixels. It was taken from QEMU's VGA text mode.
const screenFile = "testdata/bootscreen.png"

var rewrite = flag.Bool("rewrite", false, "write the reference pictures in testdata")

// cellSize is the size of one character in VGA text mode, in pixels.
var cellSize = image.Pt(9, 16)

// glyph is the picture of one character: "#" for each light pixel, "." for each dark one.
type glyph string

// glyphAt returns the glyph in a column and line of a picture. It distinguishes only light and dark pixels.
func glyphAt(p image.Image, column, line int) glyph {
	var g strings.Builder
	corner := p.Bounds().Min.Add(image.Pt(column*cellSize.X, line*cellSize.Y))
	for y := range cellSize.Y {
		for x := range cellSize.X {
			if gray := color.GrayModel.Convert(p.At(corner.X+x, corner.Y+y)).(color.Gray); gray.Y > 0x60 {
				g.WriteByte('#')
			} else {
				g.WriteByte('.')
			}
		}
	}
	return glyph(g.String())
}

// readGlyphs returns the character of each glyph in a picture that shows text. It returns an error if equal characters
// look different, or different characters look equal. The cell after the text has the cursor, and is not read.
func readGlyphs(p image.Image, text string) (map[glyph]byte, error) {
	letters, glyphs := map[glyph]byte{}, map[byte]glyph{}
	for line, content := range strings.Split(text, "\n") {
		for column, letter := range []byte(content) {
			g := glyphAt(p, column, line)
			if other, known := letters[g]; known && other != letter {
				return nil, fmt.Errorf("line %d, column %d: %q looks like %q", line, column, letter, other)
			}
			if first, known := glyphs[letter]; known && first != g {
				return nil, fmt.Errorf("line %d, column %d: %q has another glyph than its first occurrence",
					line, column, letter)
			}
			letters[g], glyphs[letter] = letter, g
		}
	}
	return letters, nil
}

// readScreen returns the text in a picture of VGA text mode. Each glyph that is not in letters becomes U+FFFD. Spaces
// at the end of lines, and empty lines at the end, are removed. The cell after the last character of want, where the
// cursor is, becomes a space.
func readScreen(p image.Image, letters map[glyph]byte, want string) string {
	lines := strings.Split(want, "\n")
	cursor := image.Pt(len(lines[len(lines)-1]), len(lines)-1)
	var text strings.Builder
	for line := range p.Bounds().Dy() / cellSize.Y {
		var content strings.Builder
		for column := range p.Bounds().Dx() / cellSize.X {
			letter, known := letters[glyphAt(p, column, line)]
			switch {
			case image.Pt(column, line) == cursor:
				content.WriteByte(' ')
			case known:
				content.WriteByte(letter)
			default:
				content.WriteRune('\uFFFD')
			}
		}
		text.WriteString(strings.TrimRight(content.String(), " ") + "\n")
	}
	return strings.TrimRight(text.String(), "\n")
}

// compareScreen returns an error unless a picture has the size of the reference picture and shows bootScreen in the
// glyphs of the reference picture.
func compareScreen(p image.Image) error {
	file, err := os.ReadFile(screenFile)
	if err != nil {
		return err
	}
	reference, err := png.Decode(bytes.NewReader(file))
	if err != nil {
		return err
	}
	letters, err := readGlyphs(reference, bootScreen)
	if err != nil {
		return fmt.Errorf("%s: %w", screenFile, err)
	}
	if got, want := p.Bounds().Size(), reference.Bounds().Size(); got != want {
		return fmt.Errorf("the picture has the size %v, and the reference picture %v", got, want)
	}
	if got := readScreen(p, letters, bootScreen); got != strings.TrimRight(bootScreen, " ") {
		return fmt.Errorf("the screen shows:\n%s", got)
	}
	return nil
}

// drawn returns a picture of the size of p. Its pixel at x, y is the pixel of p at from(x, y).
func drawn(p image.Image, from func(x, y int) (int, int)) image.Image {
	out := image.NewRGBA(p.Bounds())
	for y := range p.Bounds().Dy() {
		for x := range p.Bounds().Dx() {
			out.Set(x, y, p.At(from(x, y)))
		}
	}
	return out
}

// TestCompareScreen checks that the reference picture shows the text of the boot screen, and that the comparison notices
// a picture that is moved, mirrored or cut, that has another letter, or that is empty.
func TestCompareScreen(t *testing.T) {
	file, err := os.ReadFile(screenFile)
	require.NoError(t, err)
	reference, err := png.Decode(bytes.NewReader(file))
	require.NoError(t, err)
	require.NoError(t, compareScreen(reference))
	width, height := reference.Bounds().Dx(), reference.Bounds().Dy()
	for name, from := range map[string]func(x, y int) (int, int){
		"moved by a pixel": func(x, y int) (int, int) { return x + 1, y },
		"moved by a line":  func(x, y int) (int, int) { return x, y + cellSize.Y },
		"mirrored":         func(x, y int) (int, int) { return width - 1 - x, y },
		"upside down":      func(x, y int) (int, int) { return x, height - 1 - y },
		"empty":            func(int, int) (int, int) { return width - 1, height - 1 },
		"another letter": func(x, y int) (int, int) {
			if x < cellSize.X && y < cellSize.Y {
				return x + cellSize.X, y
			}
			return x, y
		},
	} {
		require.Error(t, compareScreen(drawn(reference, from)), name)
	}
	half := reference.(interface {
		SubImage(image.Rectangle) image.Image
	}).SubImage(image.Rect(0, 0, width, height/2))
	require.ErrorContains(t, compareScreen(half), "the reference")
}

// vncViewer is a client of the RFB protocol 3.8 (RFC 6143). It supports only the encoding Raw.
type vncViewer struct {
	conn net.Conn
	size image.Point
}

// openVNC connects to a VNC display and completes the handshake. All calls fail after the deadline of ctx. The caller
// must close conn.
func openVNC(ctx context.Context, address string) (*vncViewer, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	v := &vncViewer{conn: conn}
	if deadline, ok := ctx.Deadline(); ok {
		err = conn.SetDeadline(deadline)
	}
	if err == nil {
		err = v.greet()
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return v, nil
}

func (v *vncViewer) read(n int) ([]byte, error) {
	data := make([]byte, n)
	_, err := io.ReadFull(v.conn, data)
	return data, err
}

// answers sends a message and reads a reply of n bytes.
func (v *vncViewer) answers(message []byte, n int) ([]byte, error) {
	if _, err := v.conn.Write(message); err != nil {
		return nil, err
	}
	return v.read(n)
}

// expect returns err, or an error if got is not want.
func expect(what string, got []byte, want string, err error) error {
	if err == nil && string(got) != want {
		err = fmt.Errorf("%s of the display is %q, want %q", what, got, want)
	}
	return err
}

// greet performs the RFB handshake without authentication, and requests 32-bit pixels with the bytes blue, green, red
// and a padding byte.
func (v *vncViewer) greet() error {
	version, err := v.read(12)
	if err := expect("the version", version, "RFB 003.008\n", err); err != nil {
		return err
	}
	types, err := v.answers(version, 2)
	if err := expect("the security types", types, "\x01\x01", err); err != nil {
		return err
	}
	result, err := v.answers([]byte{1}, 4)
	if err := expect("the security result", result, "\x00\x00\x00\x00", err); err != nil {
		return err
	}
	first, err := v.answers([]byte{1}, 24) // 1 is the shared flag: other viewers stay connected
	if err != nil {
		return err
	}
	v.size = image.Pt(int(binary.BigEndian.Uint16(first)), int(binary.BigEndian.Uint16(first[2:])))
	if _, err := v.read(int(binary.BigEndian.Uint32(first[20:]))); err != nil {
		return err
	}
	format := []byte{0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0}
	encodings := []byte{2, 0, 0, 1, 0, 0, 0, 0}
	_, err = v.conn.Write(append(format, encodings...))
	return err
}

// picture requests the contents of the whole display, and returns them when all pixels have been received.
func (v *vncViewer) picture() (image.Image, error) {
	request := []byte{3, 0, 0, 0, 0, 0}
	request = binary.BigEndian.AppendUint16(request, uint16(v.size.X))
	request = binary.BigEndian.AppendUint16(request, uint16(v.size.Y))
	if _, err := v.conn.Write(request); err != nil {
		return nil, err
	}
	out := image.NewRGBA(image.Rectangle{Max: v.size})
	for missing := v.size.X * v.size.Y; missing > 0; {
		head, err := v.read(4)
		if err != nil {
			return nil, err
		}
		if head[0] != 0 { // any message but FramebufferUpdate is unexpected
			return nil, fmt.Errorf("the display sent an unexpected message of type %d", head[0])
		}
		for range binary.BigEndian.Uint16(head[2:]) {
			drew, err := v.rectangle(out)
			if err != nil {
				return nil, err
			}
			missing -= drew
		}
	}
	return out, nil
}

// rectangle reads a rectangle of an update into out. It returns the number of pixels that had no value before.
func (v *vncViewer) rectangle(out *image.RGBA) (drew int, err error) {
	head, err := v.read(12)
	if err != nil {
		return 0, err
	}
	field := func(i int) int { return int(binary.BigEndian.Uint16(head[2*i:])) }
	if encoding := binary.BigEndian.Uint32(head[8:]); encoding != 0 {
		return 0, fmt.Errorf("the display sent the unsupported encoding %d", encoding)
	}
	pixels, err := v.read(4 * field(2) * field(3))
	if err != nil {
		return 0, err
	}
	for i := 0; i < len(pixels); i += 4 {
		x, y := field(0)+i/4%field(2), field(1)+i/4/field(2)
		if out.RGBAAt(x, y).A == 0 {
			drew++
		}
		out.SetRGBA(x, y, color.RGBA{R: pixels[i+2], G: pixels[i+1], B: pixels[i], A: 255})
	}
	return drew, nil
}

// press presses and releases a key. The parameter key is its X11 keysym.
func (v *vncViewer) press(key uint32) error {
	var events []byte
	for _, down := range []byte{1, 0} {
		events = binary.BigEndian.AppendUint32(append(events, 4, down, 0, 0), key)
	}
	_, err := v.conn.Write(events)
	return err
}
