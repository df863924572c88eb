//! The unwinder, libgcc_s.so.1, which is loaded when this library is first called, and not together with it: a program that
//! merely has the library preloaded pays for no other file.
//!
//! Owned here: the functions `_Unwind_*` that Rust's standard library calls. Each is a few instructions that find the function of
//! that name, among those that the program has or else in libgcc_s.so.1, and jump to it, with the stack unchanged, because the
//! unwinder starts from the frame of its caller. glibc does nearly the same for pthread_cancel(3). The functions are hidden: no
//! other object's references are bound to them.
//!
//! A copy of the unwinder in this library, libgcc_eh.a, would not do. The end of a thread and C++ exceptions pass through our
//! frames, led by the program's unwinder, whose contexts our personality routine asks about: those contexts are that unwinder's
//! own, and no other copy may look inside.
//!
//! On anything but x86-64 there is nothing here, and the library has libgcc_s.so.1 among its NEEDED.
#![allow(unsafe_code)]

use crate::process;

/// Loads libgcc_s.so.1 now, so that it is there later, when no file can be opened any more: after chroot(2), say. Without
/// it a panic ends the process, as pthread_cancel(3) does in glibc.
pub fn load() {
    process::keeping_errno(|| {
        // SAFETY: a string; the library, which is glibc's own helper, touches nothing of ours, and stays loaded.
        unsafe { libc::dlopen(c"libgcc_s.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    });
}

#[cfg(target_arch = "x86_64")]
macro_rules! forward {
    ($($name:literal)*) => {
        // R11, which passes no argument, points to a place for the address, with the name behind it. The registers in which
        // arguments come are kept. No Rust in between: a guard in here could itself have to unwind. Two threads at the same
        // time find the same address. All in one piece, since labels are known within one only.
        std::arch::global_asm!(
            ".pushsection .text.rpcrdma.unwind, \"ax\", @progbits",
            ".Lrpcrdma_unwinder: .asciz \"libgcc_s.so.1\"",
            ".balign 16",
            ".Lrpcrdma_find:",
            ".cfi_startproc",
            "push rdi",
            ".cfi_adjust_cfa_offset 8",
            "push rsi",
            ".cfi_adjust_cfa_offset 8",
            "push rdx",
            ".cfi_adjust_cfa_offset 8",
            "push rcx",
            ".cfi_adjust_cfa_offset 8",
            "push r8",
            ".cfi_adjust_cfa_offset 8",
            "push r9",
            ".cfi_adjust_cfa_offset 8",
            "push r11",
            ".cfi_adjust_cfa_offset 8",
            // As the dynamic linker binds the program's own references: an unwinder other than libgcc's may stand in front,
            // and then we are asked about the contexts of that one. NULL is RTLD_DEFAULT.
            "xor edi, edi",
            "mov rsi, qword ptr [rsp]",
            "add rsi, 8",
            "call dlsym@PLT",
            "test rax, rax",
            "jnz 3f",
            "lea rdi, [rip + .Lrpcrdma_unwinder]",
            "mov esi, {now}",
            "call dlopen@PLT",
            "test rax, rax",
            "jz 4f",
            "mov rdi, rax",
            "mov rsi, qword ptr [rsp]",
            "add rsi, 8",
            "call dlsym@PLT",
            "test rax, rax",
            "jnz 3f",
            "4: call abort@PLT",
            "3: pop r11",
            ".cfi_adjust_cfa_offset -8",
            "mov qword ptr [r11], rax",
            "pop r9",
            ".cfi_adjust_cfa_offset -8",
            "pop r8",
            ".cfi_adjust_cfa_offset -8",
            "pop rcx",
            ".cfi_adjust_cfa_offset -8",
            "pop rdx",
            ".cfi_adjust_cfa_offset -8",
            "pop rsi",
            ".cfi_adjust_cfa_offset -8",
            "pop rdi",
            ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            ".cfi_endproc",
            $(
                concat!(".globl ", $name),
                concat!(".hidden ", $name),
                concat!(".type ", $name, ", @function"),
                ".balign 16",
                concat!($name, ":"),
                ".cfi_startproc",
                "endbr64",
                concat!("mov r11, qword ptr [rip + .Lrpcrdma", $name, "]"),
                "test r11, r11",
                "jz 2f",
                "jmp r11",
                concat!("2: lea r11, [rip + .Lrpcrdma", $name, "]"),
                "jmp .Lrpcrdma_find",
                ".cfi_endproc",
                concat!(".size ", $name, ", . - ", $name),
            )*
            ".popsection",
            ".pushsection .data.rpcrdma.unwind, \"aw\", @progbits",
            $(
                ".balign 8",
                concat!(".Lrpcrdma", $name, ":"),
                ".quad 0",
                concat!(".asciz \"", $name, "\""),
            )*
            ".popsection",
            now = const libc::RTLD_NOW,
        );
    };
}

// The functions that the standard library refers to; c-tests/exports.sh finds out when it refers to more.
#[cfg(target_arch = "x86_64")]
forward! {
    "_Unwind_Backtrace"
    "_Unwind_DeleteException"
    "_Unwind_FindEnclosingFunction"
    "_Unwind_GetCFA"
    "_Unwind_GetDataRelBase"
    "_Unwind_GetIP"
    "_Unwind_GetIPInfo"
    "_Unwind_GetLanguageSpecificData"
    "_Unwind_GetRegionStart"
    "_Unwind_GetTextRelBase"
    "_Unwind_RaiseException"
    "_Unwind_Resume"
    "_Unwind_SetGR"
    "_Unwind_SetIP"
}
