# A UEFI program. It counts its starts in the variable TrivetBoots, which is in the NVRAM, and prints on the serial port
#
#	EFI UP boots=N secure=S
#
# where S is 1 with secure boot. Then it powers the machine off. To build it:
#
#	as --64 -o efi.o efi.s && ld -m elf_x86_64 -Ttext 0 --oformat binary -o efi.bin efi.o
#
# With --defsym WAIT=1 it is efiwait.bin, which reads these commands from the serial port instead of powering off:
#
#	b       count another start and print the line again
#	v       read the variable again and print the line again
#	t N ... pass a command of N bytes to the TPM (N is one byte) and print the response in hexadecimal
#	o       power the machine off
#
# It disables interrupts, because the firmware would read the serial port too.

	.globl _start
	.text
_start:
	.ascii "MZ"
	.fill 58, 1, 0
	.long pe

pe:
	.ascii "PE\0\0"
	.short 0x8664		# x86-64
	.short 1		# sections
	.long 0, 0, 0
	.short sections - optional
	.short 0x22e		# executable, not relocated
optional:
	.short 0x20b		# PE32+
	.byte 0, 0
	.long code_size, 0, 0, 0x1000, 0x1000
	.quad 0x10000000	# image base
	.long 0x1000, 0x200	# alignment in memory and in the file
	.short 0, 0, 0, 0, 0, 0
	.long 0
	.long 0x2000, 0x200, 0	# sizes of image and headers
	.short 10, 0		# a UEFI application
	.quad 0, 0, 0, 0
	.long 0, 6
	.fill 6, 8, 0
sections:
	.ascii ".text\0\0\0"
	.long code_size, 0x1000, code_size, 0x200
	.long 0, 0
	.short 0, 0
	.long 0xe0000020	# code that can be executed, read and written
	.org 0x200

code:
	push %rbx
	sub $0x30, %rsp
	mov 88(%rdx), %rbx	# the runtime services

	.ifdef WAIT
	mov 96(%rdx), %rax	# the boot services
	xor %rcx, %rcx
	xor %rdx, %rdx
	xor %r8, %r8
	xor %r9, %r9
	call *256(%rax)		# SetWatchdogTimer
	.endif

again:	lea boots(%rip), %rcx
	lea vendor(%rip), %rdx
	lea count(%rip), %rax
	call get
	incb count(%rip)
	lea boots(%rip), %rcx
	lea vendor(%rip), %rdx
	mov $7, %r8		# in the NVRAM, for the boot and for the kernel
	mov $1, %r9
	lea count(%rip), %rax
	mov %rax, 0x20(%rsp)
	call *88(%rbx)		# SetVariable

show:	lea secure_boot(%rip), %rcx
	lea global(%rip), %rdx
	lea secure(%rip), %rax
	call get

	.ifdef WAIT
	cli
	.endif
	lea up(%rip), %rsi
	call print
	mov count(%rip), %al
	call digit
	lea secure_is(%rip), %rsi
	call print
	mov secure(%rip), %al
	call digit
	lea newline(%rip), %rsi
	call print

	.ifdef WAIT
command: call receive
	cmp $'b', %al
	je again
	cmp $'t', %al
	je tpm
	cmp $'o', %al
	je off
	cmp $'v', %al
	jne command
	lea boots(%rip), %rcx
	lea vendor(%rip), %rdx
	lea count(%rip), %rax
	call get
	jmp show

tpm:	mov $0xfed40000, %rdi	# the registers of the TPM (TCG PC Client Platform, CRB interface)
	movl $1, 0x08(%rdi)	# TPM_LOC_CTRL: request access
	movl $1, 0x40(%rdi)	# TPM_CRB_CTRL_REQ: get ready for a command
	call receive
	movzbl %al, %ecx
	lea 0x80(%rdi), %rsi
more:	call receive
	mov %al, (%rsi)
	inc %rsi
	loop more
	movl $1, 0x4c(%rdi)	# TPM_CRB_CTRL_START
busy_tpm: mov 0x4c(%rdi), %eax
	test $1, %al
	jnz busy_tpm
	movzbl 0x84(%rdi), %ecx	# the length of the response, in big-endian order
	shl $8, %ecx
	movb 0x85(%rdi), %cl
	lea 0x80(%rdi), %rsi
hex:	mov (%rsi), %bpl
	mov %bpl, %al
	shr $4, %al
	call nibble
	mov %bpl, %al
	and $15, %al
	call nibble
	inc %rsi
	loop hex
	lea newline(%rip), %rsi
	call print
	jmp command

receive: mov $0x3fd, %dx
idle:	in %dx, %al
	test $1, %al
	jz idle
	mov $0x3f8, %dx
	in %dx, %al
	ret

nibble:	cmp $10, %al
	jb digit
	add $'a'-10, %al
	jmp put
	.endif

off:	mov $2, %rcx		# shut down
	xor %rdx, %rdx
	xor %r8, %r8
	xor %r9, %r9
	call *104(%rbx)		# ResetSystem
stop:	jmp stop

# get reads the variable with the name rcx and the vendor rdx into the byte at rax.
get:
	sub $0x38, %rsp
	movq $1, size(%rip)
	xor %r8, %r8
	lea size(%rip), %r9
	mov %rax, 0x20(%rsp)
	call *72(%rbx)		# GetVariable
	add $0x38, %rsp
	ret

digit:
	add $'0', %al
	jmp put
print:
	lodsb
	test %al, %al
	jz done
	call put
	jmp print
put:
	mov %al, %ah
	mov $0x3fd, %dx
busy:	in %dx, %al
	test $0x20, %al
	jz busy
	mov %ah, %al
	mov $0x3f8, %dx
	out %al, %dx
done:	ret

	.balign 8
size:	.quad 0
vendor:	.long 0x74726976
	.short 0x6574, 0x4000
	.byte 0x80, 0, 0x67, 0x75, 0x65, 0x73, 0x74, 0x64
global:	.long 0x8be4df61	# EFI_GLOBAL_VARIABLE
	.short 0x93ca, 0x11d2
	.byte 0xaa, 0x0d, 0, 0xe0, 0x98, 0x03, 0x2b, 0x8c
boots:	.short 'T', 'r', 'i', 'v', 'e', 't', 'B', 'o', 'o', 't', 's', 0
secure_boot: .short 'S', 'e', 'c', 'u', 'r', 'e', 'B', 'o', 'o', 't', 0
count:	.byte 0
secure:	.byte 0
up:	.asciz "\nEFI UP boots="
secure_is: .asciz " secure="
newline: .asciz "\n"
	.balign 512
end:
	.set code_size, end - code
