package message

import (
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/stretchr/testify/require"
)

// batchOf returns the data of a batch of proposals, not compressed.
func batchOf(proposals ...string) []byte {
	data := NewBatch([16]byte{9}, 0)
	for _, p := range proposals {
		data = AppendToBatch(data, []byte(p))
	}
	return data
}

func TestDecodeEntry(t *testing.T) {
	single := append([]byte{singleVersion, 7}, make([]byte, 15)...)
	same := strings.Repeat("x", 1000)
	compressed := CloseBatch(batchOf("a=1", same, same))
	require.Equal(t, byte(compressedVersion), compressed[0])
	oversized := append([]byte{compressedVersion}, append(make([]byte, 16), s2.Encode(nil, make([]byte, MaxBytes+1))...)...)
	for _, test := range []struct {
		name string
		data []byte
		want []string
		err  error
	}{
		{"one proposal", append(single, "a=1"...), []string{"a=1"}, nil},
		{"one empty proposal", single, []string{""}, nil},
		{"a batch", batchOf("a=1", "", "b"), []string{"a=1", "", "b"}, nil},
		{"an empty batch", batchOf(), nil, ErrMalformed},
		{"truncated batch", batchOf("a=1", "b=1")[:EntryHeaderBytes+6], nil, ErrMalformed},
		{"truncated length", append(batchOf("a"), 0x80), nil, ErrMalformed},
		{"length above 64 bits", append(batchOf("a"), 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1), nil, ErrMalformed},
		{"truncated header", single[:16], nil, ErrMalformed},
		{"a compressed batch", compressed, []string{"a=1", same, same}, nil},
		{"truncated compressed batch", compressed[:EntryHeaderBytes+20], nil, ErrMalformed},
		{"compressed batch of too many bytes", oversized, nil, ErrMalformed},
		{"unknown version", append([]byte{4}, make([]byte, 20)...), nil, errVersion},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			err := DecodeEntry(test.data, MaxBytes, func(p []byte) { got = append(got, string(p)) })
			if test.err != nil {
				require.ErrorIs(t, err, test.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		})
	}
}

// FuzzCheckPayload checks that every forwarded entry that checkEntry accepts can be decoded, and has at least one
// proposal and none above the limit.
func FuzzCheckPayload(f *testing.F) {
	f.Add(batchOf("a=1", "b=2"))
	f.Add(append([]byte{compressedVersion}, append(make([]byte, 16), s2.Encode(nil, batchOf("a=1", "a=2")[EntryHeaderBytes:])...)...))
	f.Add(append([]byte{singleVersion}, make([]byte, 20)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		const limit = 10
		if checkEntry(data, limit) != nil {
			return
		}
		proposals := 0
		err := DecodeEntry(data, MaxBytes, func(p []byte) {
			require.LessOrEqual(t, len(p), limit)
			proposals++
		})
		require.NoError(t, err)
		require.Positive(t, proposals)
	})
}
