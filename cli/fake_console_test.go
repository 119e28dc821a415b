package main

import (
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"
)

// AttachConsole sends the output of the console from the offset that the caller names, and then each input in
// brackets.
// An injected fault with after ends the stream after the output.
func (c *fakeCloud) AttachConsole(stream grpc.BidiStreamingServer[consolev1.AttachConsoleRequest, consolev1.AttachConsoleResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.calls = append(c.calls, fmt.Sprintf("  read_only=%v take_over=%v tail=%d from=%d", first.GetReadOnly(), first.GetTakeOver(), first.GetTailBytes(), first.GetFromOffset()))
	chunks := c.console
	c.mu.Unlock()
	if first.GetKind() != consolev1.ConsoleKind_CONSOLE_KIND_SERIAL {
		return failed(codes.FailedPrecondition, "", "the VM was started without a display: stop it and start it again")
	}
	if err := stream.Send(&consolev1.AttachConsoleResponse{Opened: true, Log: "host", Offset: first.GetFromOffset()}); err != nil {
		return err
	}
	var offset int64
	for _, data := range chunks {
		if offset += int64(len(data)); offset <= first.GetFromOffset() {
			continue
		}
		if err := stream.Send(&consolev1.AttachConsoleResponse{Data: data, Offset: offset, Log: "host"}); err != nil {
			return err
		}
	}
	if err := c.fault("", "AttachConsole", true); err != nil {
		return err
	}
	if first.GetFromOffset() > 0 {
		if err := stream.Send(&consolev1.AttachConsoleResponse{Data: []byte("[continued]")}); err != nil {
			return err
		}
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(&consolev1.AttachConsoleResponse{Data: fmt.Appendf(nil, "[%s]", m.GetData())}); err != nil {
			return err
		}
	}
}

// ReadScreenshot sends a picture in two pieces.
func (c *fakeCloud) ReadScreenshot(_ *consolev1.ReadScreenshotRequest, stream grpc.ServerStreamingServer[consolev1.ReadScreenshotResponse]) error {
	for _, piece := range []string{"PNG", " of the display"} {
		if err := stream.Send(&consolev1.ReadScreenshotResponse{Data: []byte(piece)}); err != nil {
			return err
		}
	}
	return nil
}
